"""Whole projections as the identity: each exact case beside the ones that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXACT = ["one layer, both skips", "attention skip only", "both skips, shared weights", "grouped keys, Q"]
FAILING = [
    "both skips, unshared weights",
    "one layer, LayerNorm",
    "one layer, RMSNorm",
    "attention skip only, RMSNorm",
    "one layer, tied readout",
    "grouped keys, K or V",
]
TINY = {"d_model": 8, "hidden": 12, "layers": 2, "vocabulary": 11, "context": 6, "sequences": 4, "seeds": 2}


def found(study: Callable, case_name: str) -> list[dict]:
    s2 = study("s2_exact")
    case = next(c for c in s2.CASES if c.name == case_name)
    return list(s2.measured(case, s2.Settings(**TINY)))


@pytest.mark.parametrize("case", EXACT)
def test_the_projection_is_gone_and_the_function_is_the_same(study: Callable, case: str) -> None:
    for m in found(study, case):
        assert m["error"] <= 1e-14 * max(100, m["condition"])  # rounding grows with the condition number
        assert m["parameters"][1] < m["parameters"][0] and m["uniform_attention"] > 1e-4


@pytest.mark.parametrize("case", FAILING)
def test_the_same_transformation_fails_elsewhere(study: Callable, case: str) -> None:
    assert all(m["error"] > 1e-3 for m in found(study, case))


@pytest.mark.parametrize(("case", "lost"), [("one layer, both skips", False), ("one layer, tied readout", True)])
def test_dimensions_are_lost_exactly_where_no_exact_form_exists(study: Callable, case: str, lost: bool) -> None:
    s2 = study("s2_exact")
    chosen = next(c for c in s2.CASES if c.name == case)
    row = next(iter(s2.ranked(chosen, s2.Settings(**TINY, rank_width=4))))
    assert (row["dimensions"][1] < row["dimensions"][0]) == lost and row["gap"] > 1e3


def test_grouped_keys_become_channels_of_the_stream(study: Callable) -> None:
    s2 = study("s2_exact")
    assert all(m["error"] < 1e-10 for m in s2.sliced_keys(s2.Settings(**TINY)))


def test_a_record_is_written_and_read(study: Callable, tmp_path: Path) -> None:
    s2, out = study("s2_exact"), tmp_path / "record.json"
    s2.run(out=out, seeds=1, width=8, rank_width=4, with_library=False)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["setting"]["torch"] == torch.__version__ and record["refused"]
    page = s2.written(record)
    assert "| both skips, shared weights |" in page and "holds" in page
