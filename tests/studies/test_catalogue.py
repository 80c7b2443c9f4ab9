"""The catalogue: one failing type never stops it, an interrupted run resumes, and its pages show what was proved."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VERSIONS = {"deadweight": "0", "transformers": "1", "torch": "2"}
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m.bias"


@pytest.fixture(scope="module")
def catalogue(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("catalogue")


@pytest.fixture(scope="module")
def records(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("catalogue_record")


@pytest.fixture(scope="module")
def pages(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("catalogue_pages")


def entry(records: ModuleType, **changes: Any) -> Any:
    row = {
        "code": "DW002",
        "law": "key-bias",
        "verdict": "dead",
        "tier": "real",
        "note": "",
        "where": "k.bias",
        "dof": 8,
    }
    row |= {"into": [], "proof": ["k.bias [parameter]: is changed → shifted", "softmax [softmax]: ends → gone"]}
    fields = {"kind": "causal", "type": "toy", "status": "proofs", "parameters": 100, "rows": (row,)}
    return records.TypeEntry(
        **fields | {"biases": ({"where": "k.bias", "elements": 8, "verdict": "dead", "laws": ["DW002"]},)} | changes
    )


def test_a_real_type_has_its_biases_judged_and_its_proofs_recorded(catalogue: ModuleType) -> None:
    row = catalogue.catalogue_type("causal", "gpt2", 600)
    assert row["status"] == "proofs" and row["class_name"] == "GPT2LMHeadModel"
    verdicts = {bias["where"]: bias["verdict"] for bias in row["biases"]}
    assert verdicts["transformer.h.0-1.attn.c_attn.bias"] == "1536 of 2304 redundant"
    assert verdicts["transformer.h.0-1.mlp.c_fc.bias"] == "live"
    assert verdicts["transformer.h.0-1.ln_1.bias"] == "folds"
    key = next(r for r in row["rows"] if r["code"] == "DW002")
    assert key["verdict"] == "dead" and key["dof"] == 2 * 768 and "Softmax" in key["proof"][-1]


def test_a_type_that_fails_is_a_row_with_its_reason(catalogue: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str, model_type: str) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(catalogue, "opened", fail)
    row = catalogue.catalogue_type("causal", "gpt2", 60)
    assert row["status"] == "nothing" and "no such luck" in row["reason"]


def test_types_that_crash_hang_or_die_do_not_stop_the_others(
    catalogue: ModuleType, records: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def examine(kind: str, model_type: str, as_narrow: bool) -> dict[str, Any]:
        if model_type == "dies":
            os._exit(3)
        if model_type == "breaks":
            raise ValueError("a bug")
        if model_type == "loops":
            while True:
                pass
        if model_type == "wide" and not as_narrow:
            while True:
                pass
        return {"status": "clean", "reason": ""}

    monkeypatch.setattr(catalogue, "examine", examine)
    monkeypatch.setattr(catalogue, "PATIENCE", 600)  # a busy machine may take long for a second of processor time
    file = tmp_path / "record.json"
    todo = [("causal", name) for name in ("dies", "loops", "breaks", "works", "wide")]
    catalogue.run_types(todo, records.Record(VERSIONS), 2, 1, file)
    saved = {e.type: (e.status, e.reason) for e in records.Record.load(file).entries}
    assert saved == {
        "dies": ("crash", "its process ended with status 3"),
        "loops": ("timeout", "more than 1 s"),
        "breaks": ("crash", "ValueError: a bug"),
        "works": ("clean", ""),
        "wide": ("clean", ""),
    }


def test_what_is_recorded_with_these_versions_is_not_run_again(catalogue: ModuleType, records: ModuleType) -> None:
    record = records.Record(VERSIONS, (entry(records, type="gpt2"), entry(records, type="llama", status="crash")))
    choose = catalogue.choose_types
    assert choose(record, ["causal"], "gpt2,llama,opt", "", VERSIONS) == [("causal", "opt")]
    assert choose(record, ["causal"], "gpt2,llama", "crash", VERSIONS) == [("causal", "llama")]
    assert len(choose(record, ["causal"], "gpt2,llama", "", VERSIONS | {"torch": "3"})) == 2
    assert record.for_versions(VERSIONS | {"torch": "3"}).entries == ()
    with pytest.raises(ValueError, match="no type of causal is called nosuch"):
        choose(record, ["causal"], "nosuch", "", VERSIONS)


def test_a_record_is_read_back_as_it_was(records: ModuleType, tmp_path: Path) -> None:
    record = records.Record(VERSIONS, (entry(records), entry(records, type="zoo", rows=(), biases=(), status="clean")))
    record.save(tmp_path / "r.json")
    assert records.Record.load(tmp_path / "r.json") == record
    first = (tmp_path / "r.json").read_bytes()
    record.save(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_bytes() == first, "the same record is the same file"
    assert records.Record.load(tmp_path / "none.json") == records.Record({})


@pytest.mark.parametrize(
    ("dofs", "doubted", "verdict"),
    [
        ([("dead", 8)], False, "dead"),
        ([("dead", 1), ("folds", 7)], False, "folds"),
        ([("dead", 1)], True, "1 of 8 redundant"),
        ([], True, "unknown"),
        ([], False, "live"),
    ],
)
def test_a_bias_is_judged_by_its_redundant_dimensions(
    catalogue: ModuleType, dofs: list[tuple[str, int]], doubted: bool, verdict: str
) -> None:
    class Found:
        def __init__(self, verdict: str, dof: int) -> None:
            self.verdict, self.dof = verdict, dof

    assert catalogue.judge_bias(8, [Found(*pair) for pair in dofs], doubted) == verdict


def test_the_pages_have_a_row_and_a_page_for_each_type_and_link_each_proof(
    pages: ModuleType, records: ModuleType
) -> None:
    made = pages.make_pages(records.Record(VERSIONS, (entry(records),)))
    assert '<a href="types/causal-toy.html#DW002">8</a>' in made["index.html"]
    page = made["types/causal-toy.html"]
    assert 'id="DW002"' in page and "softmax [softmax]: ends → gone" in page
    data = json.loads(made["catalogue.json"])
    assert len(data["types"]) == len(made) - 2 == made["index.html"].count("<tr data-kind")
    assert "proofs are not recorded yet" in made["types/masked-bert.html"]


def test_hostile_names_stay_text(pages: ModuleType, records: ModuleType) -> None:
    bias = {"where": HOSTILE, "elements": 1, "verdict": "live", "laws": []}
    made = pages.make_pages(records.Record(VERSIONS, (entry(records, biases=(bias,), reason=HOSTILE),)))
    assert "<script>alert" not in made["types/causal-toy.html"] + made["index.html"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_filters_of_the_address_choose_rows_in_a_browser(
    pages: ModuleType, records: ModuleType, tmp_path: Path
) -> None:
    pages.write_pages(records.Record(VERSIONS, (entry(records),)), tmp_path)
    address = f"{(tmp_path / 'index.html').as_uri()}#q=k.bias+dead&law=DW002"
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=120)
    visible = re.findall(r"<tr data-kind=(?![^>]*hidden)[^>]*>\s*<td><a[^>]*>([^<]+)", shown.stdout)
    assert visible == ["toy"]


def test_the_page_of_docs_is_what_the_record_says(pages: ModuleType, records: ModuleType) -> None:
    root = Path(__file__).parents[2]
    record = records.Record.load(root / "benchmarks" / "results" / "catalogue.json.gz")
    assert (root / "docs" / "catalogue.md").read_text(encoding="utf-8") == pages.summary_page(record)
