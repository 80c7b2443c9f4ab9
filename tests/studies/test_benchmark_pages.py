"""Every page of a benchmark is what its record says, to the letter: nobody edits such a page by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {  # those with a Row and a function `markdown`; others have a test beside the rest of theirs
    "accounts": "accounts",
    "audit_speed": "audit-speed",
    "completeness": "completeness",
    "reduce_scale": "reduce-scale",
}
Load = Callable[[str], ModuleType]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_record_says(benchmark: Load, name: str) -> None:
    module, record = benchmark(name), recorded(name)
    assert module.markdown([module.Row(**row) for row in record["rows"]], record["setting"]) == page(PAGES[name])


def test_the_page_of_coverage_is_what_its_record_says(benchmark: Load) -> None:
    report = benchmark("coverage_report")
    setting, attempts = report.read(ROOT / "benchmarks" / "results" / "coverage.json")
    assert report.markdown(attempts, setting) == page("coverage")


def test_the_page_of_exactness_is_what_its_record_says(benchmark: Load) -> None:
    report, record = benchmark("exactness_report"), recorded("exactness")
    assert report.markdown([report.from_json(row) for row in record["rows"]], record["setting"]) == page("exactness")


def test_the_page_of_mutants_is_what_its_record_says(benchmark: Load) -> None:
    record = recorded("mutants")
    assert benchmark("mutation.page").page(record["rows"], record["setting"]) == page("mutants")
