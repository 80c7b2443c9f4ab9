"""Names of repeated layers collapse into patterns that stand for exactly these names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadweight.report.name_pattern import collapse, collapse_with_names, join_pieces, pieces_text, ranges


def shown(names: list[str]) -> list[str]:
    return [str(pattern) for pattern in collapse(names)]


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([f"h.{i}.attn.bias" for i in range(12)], ["h.0-11.attn.bias"]),
        ([f"h.{i}.attn.bias" for i in (0, 1, 2, 5)], ["h.0-2,5.attn.bias"]),
        ([f"h.{i}.moe.bias" for i in range(1, 12, 2)], ["h.1-11:2.moe.bias"]),
        ([f"l.{i}.experts.{j}.up.bias" for i in range(3) for j in range(4)], ["l.0-2.experts.0-3.up.bias"]),
        (["l.0.e.0.b", "l.0.e.1.b", "l.1.e.0.b"], ["l.0.e.0-1.b", "l.1.e.0.b"]),
        (["ln.weight", "ln.bias"], ["ln.{weight,bias}"]),
        ([f"h.{i}.ln.{w}" for i in range(2) for w in ("weight", "bias")], ["h.0-1.ln.{weight,bias}"]),
        (["h.0.ln.weight", "h.1.ln.weight", "h.0.ln.bias"], ["h.0-1.ln.weight", "h.0.ln.bias"]),
        (["encoder_layer_0.w.bias", "encoder_layer_1.w.bias"], ["encoder_layer_0-1.w.bias"]),
        (["tables.0", "tables.1"], ["tables.0-1"]),
        (["ln_1.bias", "ln_2.bias"], ["ln_1.bias", "ln_2.bias"]),
        (["fc1.bias", "fc2.bias"], ["fc1.bias", "fc2.bias"]),
        (["h.00.x.b", "h.01.x.b"], ["h.00.x.b", "h.01.x.b"]),
        (["weight"], ["weight"]),
        (["*"], ["*"]),
        ([], []),
    ],
)
def test_layers_collapse_and_names_that_only_contain_digits_do_not(names: list[str], patterns: list[str]) -> None:
    assert shown(names) == patterns


components = st.sampled_from(["h", "ln_1", "weight", "bias", "0", "1", "2", "10", "07", "a{b", ""])


@given(st.lists(st.lists(components, min_size=1, max_size=4).map(".".join), max_size=30))
def test_each_name_lies_in_exactly_one_pattern(names: list[str]) -> None:
    patterns = collapse(names)
    for name in names:
        assert sum(name in pattern for pattern in patterns) == 1


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=25))
def test_patterns_stand_for_no_name_that_was_not_there(pairs: set[tuple[int, int]]) -> None:
    patterns = collapse(f"l.{i}.e.{j}.b" for i, j in pairs)
    covered = {(i, j) for i in range(5) for j in range(5) if any(f"l.{i}.e.{j}.b" in p for p in patterns)}
    assert covered == pairs


@pytest.mark.parametrize(
    ("values", "text"),
    [({3}, "3"), ({0, 1}, "0-1"), ({0, 2, 4}, "0,2,4"), ({0, 2, 4, 6}, "0-6:2"), ({9, 1, 2, 3}, "1-3,9")],
)
def test_ranges(values: set[int], text: str) -> None:
    assert ranges(values) == text


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (None, ""),
        (((768, 1536),), "[768:1536]"),
        (((0, 2), (4, 6), (8, 10)), "[0:2, 4:6, 8:10]"),
        (tuple((4 * i, 4 * i + 2) for i in range(12)), "[0:2, 4:6, …, 44:46 in 12 pieces]"),
    ],
)
def test_many_pieces_are_abbreviated_with_their_number(pieces: tuple | None, text: str) -> None:
    assert pieces_text(pieces) == text


def test_pieces_that_touch_or_overlap_become_one_and_a_whole_parameter_swallows_them() -> None:
    assert join_pieces([((4, 8),), ((0, 4),), ((12, 16), (14, 20))]) == ((0, 8), (12, 20))
    assert join_pieces([((4, 8),), None]) is None


def test_every_name_belongs_to_the_pattern_that_it_fits() -> None:
    names = ["h.0.a.bias", "h.1.a.bias", "x.bias", "h.0.a.weight", "h.1.a.weight", "h.7.b.bias"]
    assert [(str(p), members) for p, members in collapse_with_names(names)] == [
        ("h.0-1.a.{bias,weight}", ["h.0.a.bias", "h.1.a.bias", "h.0.a.weight", "h.1.a.weight"]),
        ("x.bias", ["x.bias"]),
        ("h.7.b.bias", ["h.7.b.bias"]),
    ]
