"""What a slim checkpoint holds: the same after writing and reading, and refused if it is something else."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadweight import slim
from deadweight.slim.format import (
    KINDS,
    VERSION,
    BiasSpec,
    CacheSpec,
    EmbeddingSpec,
    HeadsSpec,
    IdentitySpec,
    LinearSpec,
    PlainLinearSpec,
    RowGroup,
    SlimSpec,
    UnitRun,
    WithoutSpec,
)

EVERY = {
    "a": LinearSpec(8, 6, (RowGroup(4, 7, 2, True), RowGroup(2, 0, 0, False)), shuffled=True),
    "b": PlainLinearSpec(8, 6, bias=False),
    "c": EmbeddingSpec(11, 8, None, 3),
    "d": IdentitySpec(),
    "e": BiasSpec(6),
    "f": WithoutSpec({"weight": 1.0}),
}
HEADS = HeadsSpec(4, 2, 16, 8, keys=(6, 16), values=(8, 3), listed=True)


def test_every_kind_is_the_same_after_writing_and_reading() -> None:
    assert {spec.kind for spec in EVERY.values()} == set(KINDS)
    written = SlimSpec(EVERY, {"h.0.attn": HEADS})
    assert SlimSpec.from_json(json.loads(json.dumps(written.to_json()))) == written
    assert written.layers_in_other_form == ["a", "c"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"format": VERSION + 1, "layers": {}}, "expected"),
        ({"layers": {}}, "format None"),
        ([], "format 'list'"),
        ({"format": VERSION, "layers": {"x": {"kind": "sparse"}}}, "kind 'sparse' at x"),
        ({"format": VERSION, "layers": {"x": {"kind": "plain", "inputs": 3}}}, "does not fit its kind"),
        ({"format": VERSION, "layers": {"x": 3}}, "kind None at x"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SlimSpec.from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": [6]}, "keys \\(6,\\) of 2 key heads of 16"),
        ({"keys": [6, 17]}, "keys \\(6, 17\\) of 2 key heads of 16"),
        ({"values": [8, 0]}, "values \\(8, 0\\) of 2 key heads of 8"),
        ({"values": [8, -1]}, "found values 1 = -1"),
        ({"values": [8, 2.0]}, "found values 1 = 2.0"),
        ({"values": 8}, "not iterable"),
        ({"keys": None}, "not iterable"),
        ({"d_qk": 1 << 40}, "found d_qk = 1099511627776"),
        ({"heads": True}, "found heads = True"),
        ({"heads": 5}, "5 heads that share 2 of keys"),
        ({"key_heads": 0}, "4 heads that share 0 of keys"),
        ({"listed": "no"}, "neither true nor false"),
        ({"merged": 2}, "unexpected keyword"),
    ],
)
def test_heads_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    data = SlimSpec(heads={"attention": HEADS}).to_json()
    data["heads"]["attention"] |= change
    with pytest.raises(ValueError, match=f"found heads at attention.*{message}"):
        SlimSpec.from_json(data)


def test_the_runtime_imports_torch_and_transformers_alone() -> None:
    allowed = {"torch", "transformers", "triton"}
    for file in Path(slim.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in STANDARD, (file.name, name)


STANDARD = {
    *(
        "__future__",
        "collections",
        "copy",
        "dataclasses",
        "functools",
        "inspect",
        "itertools",
        "math",
        "threading",
        "re",
        "typing",
    ),
    *("weakref", "zlib"),
}


UNITS = (UnitRun(3, (6, 2, 4, 4)), UnitRun(5, (4, 4, 4, 4)))
CACHE = CacheSpec(4, 2, 16, 16, 8, 4, 2, 2, (UNITS, UNITS))


def test_a_coded_cache_comes_back_from_json_and_counts_its_bytes() -> None:
    spec = SlimSpec(caches={"model.layers.0.self_attn": CACHE})
    assert SlimSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert CACHE.n_units == 8 and CACHE.token_bytes == 2 * (2 * 8 + 1)
    assert CACHE.bytes_at(100) == 100 * 34 + 4 * 2 * 32 * 2 and CACHE.bytes_before(100) == 100 * 2 * 32 * 2
    assert CACHE.bytes_at(2) == 2 * 34 + 2 * 2 * 32 * 2  # fewer tokens than are kept as they are
    assert CACHE.inputs == 16 and replace(CACHE, key_fields=4, value_fields=0).inputs == 32


def run_of(*widths: int, count: int = 8) -> list[list[dict[str, Any]]]:
    return [[{"count": count, "widths": list(widths)}]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sets": run_of(4, 4, 4)}, "codes of .* bits"),
        ({"sets": run_of(9, 1, 4, 2)}, "codes of .* bits"),
        ({"sets": run_of(8, 1, 4, 1)}, "12 of them in the lower half"),
        ({"sets": run_of(5, 4, 5, 4)}, "units of 18 bits"),
        ({"sets": run_of(0, 8, 2, 4)}, "units of 18 bits"),  # the upper half starts at bit 6
        ({"sets": [[{"count": 3, "widths": [4, 4, 4, 4]}], [{"count": 4, "widths": [4, 4, 4, 4]}]]}, "equally long"),
        ({"sets": run_of(4, 4, 4, 4) * 2}, "in 4 sets"),
        ({"sets": []}, "in 0 sets"),
        ({"sets": run_of(4, 4, 4, 4, count=-8)}, "expected a whole number"),
        ({"sets": run_of(4, 4, 4, 4, count=0)}, "equally long"),
        ({"sets": run_of(4, 4, 4, 4, count=(1 << 20) - 1)}, "1048575 units for"),  # a kilobyte that takes gigabytes
        ({"sets": [[{"count": 8, "width": 4}]] * 2}, "unexpected keyword"),
        ({"key_fields": 0, "value_fields": 4}, "0 and 4 codes in a unit"),
        ({"key_fields": 9, "value_fields": 0}, "9 and 0 codes in a unit"),
        ({"weights": 3}, "unexpected keyword"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    data = SlimSpec(caches={"attention": CACHE}).to_json()
    data["caches"]["attention"] |= change
    with pytest.raises(ValueError, match=f"found a cache at attention.*({message})"):
        SlimSpec.from_json(data)
