"""The page of training speed is what its record says, and its arithmetic is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def speed(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train_speed")


def test_the_page_is_what_the_record_says(speed: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "train_speed.json").read_text(encoding="utf-8"))
    rows = [speed.Row(**row) for row in record["rows"]]
    assert speed.markdown(rows, record["setting"]) == (ROOT / "docs" / "train-speed.md").read_text(encoding="utf-8")


def test_tokens_and_flops_are_those_of_the_shape(speed: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "train_speed.json").read_text(encoding="utf-8"))
    for row in record["rows"]:
        shape = speed.SHAPES[row["shape"]]
        assert row["tokens_per_second"] == pytest.approx(shape.batch * shape.context / row["milliseconds"] * 1e3)
        used = row["tokens_per_second"] * shape.flops_per_token(row["parameters"]) / speed.PEAK
        assert row["utilisation"] == pytest.approx(used) and 0 < used < 1
