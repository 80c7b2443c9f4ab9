"""Every page of a study is what its record says, to the letter; and the query study runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deadweight.report.record import load_record, read_rows, save_record, write_rows
from deadweight.train.result import Update

ROOT = Path(__file__).parents[2]
PAGES = {
    "s1_bias": ("written", "biases"),
    "s1_encoders": ("written", "encoders"),
    "s1_key_drift": ("written", "key-drift"),
    "s2_exact": ("written", "exact-projections"),
    "s2_skips": ("written", "skip-boundary"),
    "s3_allocation": ("written", "allocation"),
    "s3_plans": ("written", "plans"),
    "s4_saturation": ("written", "saturation"),
    "s4_heads": ("written", "small-heads"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_record_says(study: Callable[[str], ModuleType], name: str) -> None:
    function, page = PAGES[name]
    record = json.loads((ROOT / "studies" / f"{name}.json").read_text(encoding="utf-8"))
    assert getattr(study(name), function)(record) == (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_the_page_of_query_weights_is_what_its_two_records_say(study: Callable[[str], ModuleType]) -> None:
    s2, folder = study("s2_query_weights"), ROOT / "studies"
    record = json.loads((folder / "s2_query_weights.json").read_text(encoding="utf-8"))
    at_scale = s2.read_large(folder / "s2_large.jsonl", folder / "s2_large_pilot.jsonl")
    assert s2.page(record, at_scale) == (ROOT / "docs" / "query-weights.md").read_text(encoding="utf-8")


def test_the_page_for_designers_is_what_the_records_say(study: Callable[[str], ModuleType]) -> None:
    choices = study("choices")
    assert choices.page(choices.Records()) == (ROOT / "docs" / "choices.md").read_text(encoding="utf-8")


def test_advice_follows_from_the_interval(study: Callable[[str], ModuleType]) -> None:
    choices = study("choices")
    advice = lambda mean, error: choices.advice_of(choices.Difference(mean, error, 3))  # noqa: E731
    assert [advice(0.02, 0.001), advice(0.001, 0.0005), advice(-0.02, 0.001)] == ["Keep it", "Drop it", "Drop it"]
    assert advice(0.02, 0.01) == "Undecided"
    kinds = [
        [choices.advice_of(choices.Difference(m, 0.0002, 3), k) for m in (-0.02, 0.001, 0.02)] for k in choices.ADVICE
    ]
    assert kinds == [list(words) for words in choices.ADVICE.values()]


def test_the_page_at_scale_is_what_its_record_says(study: Callable[[str], ModuleType]) -> None:
    report, folder = study("large_report"), ROOT / "studies"
    results = report.Results(report.read_record(folder / "large.jsonl"))
    assert report.whole_page(results) == (ROOT / "docs" / "at-scale.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_query_study_runs_records_and_resumes(
    study: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s2 = study("s2_query_weights")
    for name, value in {"WIDTH": 16, "LAYERS": 1, "HEADS": 2, "CONTEXT": 16, "FURTHER": ("full",)}.items():
        monkeypatch.setattr(s2, name, value)
    shapes = {"full": {}, "identity Q": {"query": "identity"}}
    monkeypatch.setattr(s2, "SHAPES", shapes)
    text = tmp_path / "t.txt"
    text.write_text("the cat sat on the mat. " * 60)
    out = tmp_path / "record.json"
    for only in (["full"], ["full", "identity Q"]):
        s2.run(text=str(text), out=out, steps=3, batch=2, seeds=2, only=only)
    record = json.loads(out.read_text())
    assert {shape: len(told["members"]) for shape, told in record["curves"].items()} == {"full": 20, "identity Q": 12}
    sizes = [record["curves"][s]["parameters"]["non_embedding"] for s in shapes]
    assert sizes[0] - sizes[1] == 16 * 16
    assert s2.small_differences(record)["identity Q"].seeds == 2
    assert any(line.startswith("| identity Q | ") for line in s2.small_tables(record))


BENCHMARKS = {
    "accounts": "accounts",
    "audit_speed": "audit-speed",
    "completeness": "completeness",
    "compress_memory": "compress-memory",
    "coverage": "coverage",
    "exactness": "exactness",
    "modules": "modules",
    "reduce_scale": "reduce-scale",
    "train_speed": "train-speed",
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_makes_its_page_again_from_its_record(
    benchmark: Callable[[str], ModuleType], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)  # as a program it silences other libraries
    record, page = ROOT / "benchmarks" / "results" / f"{name}.json", tmp_path / "page.md"
    before = record.read_bytes()
    benchmark(name).main(recorded=record, page=page)
    made, published = (f.read_text(encoding="utf-8") for f in (page, ROOT / "docs" / f"{BENCHMARKS[name]}.md"))
    assert published == made
    assert record.read_bytes() == before


def test_the_page_of_mutants_is_what_its_record_says(benchmark: Callable[[str], ModuleType]) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text(encoding="utf-8"))
    made = benchmark("mutation.page").page(record["rows"], record["setting"])
    assert made == (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*BENCHMARKS, "mutants", "cache"])
def test_a_record_of_rows_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record = load_record(file)
    save_record(tmp_path / "record.json", record)
    assert load_record(tmp_path / "record.json") == record
    if file.read_text(encoding="utf-8").startswith("{\n"):  # not one row per line, as two benchmarks once wrote theirs
        assert (tmp_path / "record.json").read_bytes() == file.read_bytes()


def test_rows_are_dataclasses_or_dicts(tmp_path: Path) -> None:
    write_rows(tmp_path / "deep" / "record.json", {"steps": 3}, [Update(1, 2, 3.0), {"step": 2}], target=4)
    setting, rows = read_rows(tmp_path / "deep" / "record.json")
    assert setting == {"steps": 3} and rows[0]["tokens"] == 2 and rows[1] == {"step": 2}
    assert load_record(tmp_path / "deep" / "record.json")["target"] == 4
    assert load_record(tmp_path / "absent.json") == {}
    write_rows(None, {}, [])
