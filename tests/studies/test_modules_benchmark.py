"""The benchmark over plain PyTorch modules: every way in which a module can end is a row of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = '''
import os
import signal
import torch
from torch import nn
from corpus.entry import Entry


class Odd(nn.Linear):
    """A layer that misbehaves when it is called."""

    def __init__(self, act):
        super().__init__(3, 2)
        self.act = act

    def forward(self, x):
        self.act()
        return super().forward(x)


def crash():
    raise SystemExit("no")


def hang():
    while True:
        pass


def ended():
    os.kill(os.getpid(), signal.SIGKILL)


def odd(act):
    return Odd(act), (torch.randn(4, 3),)


def unbuilt():
    raise ImportError("no such layer")


def perceptron():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (torch.randn(20, 3),)


ENTRIES = [
    Entry("odd/proved", perceptron, complete=True),
    Entry("odd/trained", perceptron, training=True),
    Entry("odd/crash", lambda: odd(crash)),
    Entry("odd/hang", lambda: odd(hang)),
    Entry("odd/killed", lambda: odd(ended)),
    Entry("odd/hungry", lambda: bytearray(1 << 40)),
    Entry("odd/unbuilt", unbuilt),
    Entry("odd/absent", perceptron, package="no_such_package"),
    Entry("odd/elsewhere", perceptron, checkout="nowhere"),
]
'''


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("modules")


@pytest.fixture(scope="module")
def rows(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The odd corpus, once. A system that is short of memory ends a process with SIGKILL."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_modules.py").write_text(CORPUS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
        bench.main(
            site=[folder],
            corpus_name="odd_modules",
            seconds=3,
            jobs=3,
            json_file=folder / "r.json",
            page=folder / "p.md",
        )
    assert "odd/hang" in (folder / "p.md").read_text(encoding="utf-8")
    return {row["name"]: row for row in json.loads((folder / "r.json").read_text(encoding="utf-8"))["rows"]}


def test_a_module_with_findings_has_proofs_and_an_account(rows: dict[str, dict]) -> None:
    row = rows["odd/proved"]
    assert row["outcome"] == "proofs" and row["parameters"] == 16 + 8 + 10
    assert 0 < row["explained"] <= row["measured"] <= row["parameters"]
    assert row["redundant"] > 0 and row["findings"] > 0 and row["memory"] >= 0 and 0 < row["seconds"] < 3
    assert rows["odd/trained"]["outcome"] == "proofs" and rows["odd/trained"]["measured"] is None


def test_a_module_that_ends_badly_is_reported_and_stops_no_other(rows: dict[str, dict]) -> None:
    assert rows["odd/crash"]["outcome"] == "crash" and rows["odd/crash"]["parameters"] == 8
    assert rows["odd/hang"]["outcome"] == "timeout" and rows["odd/hang"]["seconds"] == 3
    assert rows["odd/hungry"]["outcome"] == rows["odd/killed"]["outcome"] == "out of memory"
    assert rows["odd/unbuilt"]["outcome"] == "not built" and "no such layer" in rows["odd/unbuilt"]["reason"]


def test_what_is_not_there_is_skipped_and_said(rows: dict[str, dict]) -> None:
    assert "no_such_package" in rows["odd/absent"]["reason"] and "nowhere" in rows["odd/elsewhere"]["reason"]
    assert {rows[n]["outcome"] for n in ("odd/absent", "odd/elsewhere")} == {"skipped"}


def test_recorded_rows_are_kept_and_skipped_ones_tried_again(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = bench.entries_of(bench.Limits())[:3]
    monkeypatch.setattr(bench, "attempt", lambda entry, limits: bench.Row(entry.name, "proofs"))
    keep = [bench.Row(entries[0].name, "timeout"), bench.Row(entries[1].name, "skipped")]
    rows = bench.run(entries, bench.Limits(), 1, keep, lambda rows: None)
    assert [row.outcome for row in bench.ordered(rows, entries)] == ["timeout", "proofs", "proofs"]


def test_names_of_the_corpus_differ_and_are_more_than_a_hundred(bench: ModuleType) -> None:
    names = [entry.name for entry in bench.entries_of(bench.Limits())]
    assert len(set(names)) == len(names) > 100


def test_the_page_is_what_the_record_says(bench: ModuleType) -> None:
    setting, found = bench.record.read_rows(ROOT / "benchmarks" / "results" / "modules.json")
    page = bench.markdown([bench.Row(**row) for row in found], setting)
    assert page == (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
