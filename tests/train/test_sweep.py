"""A sweep runs everything once, resumes where it stopped, and reports mean and spread."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from deadweight.errors import DeadweightError
from deadweight.report.sweep import markdown, plot
from deadweight.train import sweep as package
from deadweight.train.grid import make_sweep
from deadweight.train.loop import Trainer
from deadweight.train.sweep import RunResult, summarise, sweep

BASE: dict[str, Any] = {
    "seeds": [0, 1],
    "model": {"d_model": 16, "n_layers": 1, "heads": 2, "context": 16},
    "train": {"steps": 3, "batch": 2, "warmup": 1, "evaluate_tokens": 200},
    "grid": {"train.weight_decay": [0.1, 0.0]},
    "variant": [{"name": "full"}, {"name": "identity Q", "model.query": "identity"}],
}


def test_every_combination_is_a_run_of_its_own() -> None:
    jobs = make_sweep(BASE)
    assert len(jobs) == 2 * 2 * 2 and len({j.folder for j in jobs}) == 8
    assert {(j.variant, j.seed) for j in jobs} >= {("full, weight_decay 0.1", 0), ("identity Q, weight_decay 0.0", 1)}
    assert {j.run.model.get("query", "full") for j in jobs if j.variant.startswith("identity")} == {"identity"}


def test_an_interrupted_sweep_resumes(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = make_sweep({**BASE, "data": {"text": text}, "grid": {}})
    real, started = package.one, []

    def stops(job: Any, folder: Path) -> RunResult:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(job.folder)
        return real(job, folder)

    monkeypatch.setattr(package, "one", stops)
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, tmp_path)
    monkeypatch.setattr(package, "one", lambda job, folder: started.append(job.folder) or real(job, folder))
    outcomes = sweep(jobs, tmp_path)
    assert len(started) == len(set(started)) == 4
    assert [o.seed for o in outcomes] == [0, 1, 0, 1] and all(o.error is None for o in outcomes)
    found = summarise(outcomes)
    assert found[0].mean == pytest.approx(statistics.mean(o.bits_per_byte or 0 for o in outcomes[:2]))
    assert found[1].parameters == (found[0].parameters or 0) - 16 * 16
    plot(found, tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text() and found[1].words in markdown(found)
    changed = make_sweep({**BASE, "data": {"text": text}, "grid": {}, "train": {**BASE["train"], "steps": 4}})
    with pytest.raises(DeadweightError, match="was made with other settings"):
        sweep(changed, tmp_path)


def test_a_run_that_fails_is_counted_and_the_others_go_on(tmp_path: Path, text: str) -> None:
    tables = {
        **BASE,
        "seeds": [0],
        "data": {"text": text},
        "grid": {"train.learning_rate": [1e-3, 1e30]},
        "variant": [{"name": "full"}],
        "train": {**BASE["train"], "steps": 8},
    }
    good, bad = summarise(sweep(make_sweep(tables), tmp_path))
    assert (good.failed, len(good.values)) == (0, 1) and (bad.failed, bad.words) == (1, "none finished")


def test_a_run_that_does_not_fit_ends_no_other(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {**BASE, "seeds": [0], "data": {"text": text}, "variant": [{"name": "full"}, {"name": "wide"}]}
    tables["grid"] = {"train.weight_decay": [0.1]}
    plain = Trainer.one_step

    def full(self: Trainer) -> torch.Tensor:
        if "wide" in str(self.out):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self)

    monkeypatch.setattr(Trainer, "one_step", full)
    found = sweep(make_sweep(tables), tmp_path)
    assert [o.error for o in found] == [None, "OutOfMemoryError: CUDA out of memory"]


def test_ray_gives_the_results_of_this_machine(tmp_path: Path, text: str) -> None:
    pytest.importorskip("ray")
    jobs = make_sweep({**BASE, "seeds": [0], "data": {"text": text}, "grid": {}})
    here = sweep(jobs, tmp_path / "here")
    there = sweep(jobs, tmp_path / "there", ray="local")
    assert [o.bits_per_byte for o in there] == pytest.approx([o.bits_per_byte for o in here], rel=1e-6)


def test_a_run_that_could_not_begin_is_tried_again(tmp_path: Path, text: str) -> None:
    later = tmp_path / "later.txt"
    jobs = make_sweep({**BASE, "seeds": [0], "data": {"text": str(later)}, "grid": {}, "variant": [{}]})
    assert "does not exist" in str(sweep(jobs, tmp_path / "out")[0].error)
    later.write_bytes(Path(text).read_bytes())
    assert sweep(jobs, tmp_path / "out")[0].error is None


WRONG = {
    "no seeds": ({"seeds": []}, "expected a list of whole numbers"),
    "one seed twice": ({"seeds": [1, 1]}, "expected every seed once"),
    "a grid without a list": ({"grid": {"train.steps": 3}}, "expected a list of values"),
    "a grid over nothing": ({"grid": {"steps": [3]}}, "expected table.key"),
    "a misspelt key": ({"grid": {"train.step": [3]}}, "did you mean steps?"),
    "an impossible shape": ({"grid": {"model.heads": [2, 3]}}, "3 heads for d_model = 16"),
    "one name twice": ({"variant": [{"name": "a"}, {"name": "A"}]}, "found two variants with the same name"),
    "a number for a table": ({"model": 3}, "expected a table [model]"),
    "a list for the grid": ({"grid": [1]}, "expected a table [grid]"),
    "one bracket too few": ({"variant": {"name": "a"}}, "expected one or more tables [[variant]]"),
    "a number for a variant": ({"variant": [1]}, "expected one or more tables [[variant]]"),
    "no variants": ({"variant": []}, "expected one or more tables [[variant]]"),
    "a misspelt table": ({"grids": {}}, "did you mean grid?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_reported_before_the_first_run(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(DeadweightError) as error:
        make_sweep({**BASE, **change})
    assert message in str(error.value)
