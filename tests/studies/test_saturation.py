"""The saturation study: its control saturates, its record holds no path, its statistics are what they are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deadweight import embedded
from deadweight.audit.run import one_thread


def test_a_record_is_written_and_read_and_random_weights_saturate(
    study: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    s4, out, text = study("s4_saturation"), tmp_path / "record.json", tmp_path / "prose.txt"
    text.write_text(embedded.prose()[:2000], encoding="utf-8")
    with one_thread():
        s4.run(models=["demo"], text=str(text), out=out, windows=3, length=64, seed=0)
    told = out.read_text(encoding="utf-8")
    trained, control = json.loads(told)["models"]
    assert str(tmp_path) not in told and control["model"] == "demo, random weights"
    assert {h["verdict"] for h in s4.heads_of(control)} == {"saturates"}
    assert [h for h in s4.heads_of(trained) if h["verdict"] == "saturates" and h["sure"]] == []
    page = s4.written(json.loads(told))
    assert "| demo, random weights | the norm falls like 1/L | 12 of 12 heads" in page and "| holds |" in page
    assert "| demo | logits are bounded, as the proof assumes |" in page and "does not hold |" in page
    s4.figure(json.loads(told), tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size > 1000


def test_rank_correlation_sees_order_alone(study: Callable[[str], ModuleType]) -> None:
    s4 = study("s4_saturation")
    assert s4.rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert s4.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert s4.ranks([5, 1, 5]) == [1.5, 0, 1.5]


def test_a_slope_of_long_rows_leaves_short_ones_out(study: Callable[[str], ModuleType]) -> None:
    head = {"by_length": {"length": [4, 64, 128, 256], "log_norm": [9.0, 0.0, 0.0, 0.0]}}
    assert study("s4_saturation").slope_from(head, 64) == pytest.approx(0)
    assert study("s4_saturation").slope_from(head, 4) < -1
    assert study("s4_saturation").slope_from(head, 128) is None
