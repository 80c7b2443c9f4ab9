"""What public checkpoints cost: the configs are those of the checkpoints, and the page says what the record says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINTS = json.loads((ROOT / "benchmarks" / "checkpoints.json").read_text(encoding="utf-8"))
RECORD = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def costs(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("costs")


@pytest.fixture(scope="module")
def report(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("costs_report")


def checkpoint(name: str) -> dict[str, Any]:
    return next(c for c in CHECKPOINTS if c["name"] == name)


def test_names_differ_and_most_checkpoints_have_a_published_count() -> None:
    assert len({c["name"] for c in CHECKPOINTS}) == len({c["hub"] for c in CHECKPOINTS}) == len(CHECKPOINTS)
    assert sum(c["published"] is None for c in CHECKPOINTS) <= 3


def test_the_audited_models_have_as_many_parameters_as_the_checkpoints() -> None:
    audited = {row["name"]: row["parameters"] for row in RECORD["rows"] if "error" not in row}
    for c in CHECKPOINTS:
        if c["published"] is not None and c["name"] in audited:
            assert audited[c["name"]] == c["published"] - c.get("of_which_buffers", 0), c["name"]


def test_every_checkpoint_of_the_list_is_in_the_record_and_was_audited() -> None:
    assert [row["name"] for row in RECORD["rows"]] == [c["name"] for c in CHECKPOINTS]
    assert not [row for row in RECORD["rows"] if "error" in row]


def test_a_checkpoint_is_audited_again_with_the_recorded_result(costs: ModuleType) -> None:
    row = costs.cost_of(checkpoint("OPT 125M"))
    recorded = next(r for r in RECORD["rows"] if r["name"] == "OPT 125M")
    assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in recorded.items() if k != "seconds"}
    bias = next(law for law in row["laws"] if law["code"] == "DW003")
    assert bias["verdict"] == "folds" and bias["parameters"] == 12 * 768 and bias["bytes"] == 2 * bias["parameters"]


def test_a_checkpoint_that_fails_is_a_row_and_a_line_of_the_page(costs: ModuleType, report: ModuleType) -> None:
    broken = {"name": "broken", "hub": "a/b", "config": {"model_type": "nosuch", "dtype": "float32"}}
    row = costs.cost_of(broken)
    assert row["name"] == "broken" and "nosuch" in row["error"]
    assert "Not audited: broken" in report.costs_page(RECORD | {"rows": [*RECORD["rows"], row]})


def test_the_page_of_docs_is_what_the_record_says(report: ModuleType) -> None:
    assert (ROOT / "docs" / "costs.md").read_text(encoding="utf-8") == report.costs_page(RECORD)


def test_the_catalogue_shows_the_checkpoints_of_a_type(report: ModuleType, benchmark: Callable) -> None:
    pages = benchmark("catalogue_pages").make_pages(benchmark("catalogue_record").Record({}))
    assert "LLaMA 3.1 8B" in pages["types/causal-llama.html"] and "GPT-2 XL" not in pages["types/causal-llama.html"]
    assert "openai-community/gpt2-xl" in pages["types/causal-gpt2.html"]
