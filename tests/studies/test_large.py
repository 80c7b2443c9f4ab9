"""The plan of the studies at 38 M parameters: its order, its sweeps, and a record that a later call continues."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from deadweight.allocate.constraints import Rules
from deadweight.allocate.plan import UniformShape
from deadweight.allocate.plan import plan as allocate
from deadweight.errors import DeadweightError
from deadweight.train.repeated_runs import TrainingJob


@pytest.fixture
def plan(study: Callable[[str], ModuleType]) -> Any:
    study("large")
    import large_plan

    return large_plan


def lines(job: TrainingJob, best: float) -> list[dict[str, Any]]:
    """Finished runs whose loss is a parabola over the logarithm of the learning rate."""
    return [
        {
            "kind": "run",
            "graph": job.graph,
            "steps": job.steps,
            "upkeep": job.upkeep,
            "member": asdict(m),
            "valid_loss": 1.0 + 0.02 * math.log2(m.learning_rate / best) ** 2,
        }
        for m in job.members
    ]


def play(plan: Any, count: int, best: float) -> tuple[list[TrainingJob], list[dict[str, Any]]]:
    jobs: list[TrainingJob] = []
    runs: list[dict[str, Any]] = []
    while len(jobs) < count and (left := plan.StudyPlan(runs).left()):
        jobs.append(left[0])
        runs += lines(left[0], best)
    return jobs, runs


def test_a_comparison_is_whole_before_the_next_and_has_three_seeds_at_the_rate_of_its_sweep(plan: Any) -> None:
    _, runs = play(plan, 500, best=1.1e-3)
    finished = plan.StudyPlan(runs)
    assert finished.left() == []
    for part in plan.PARTS:
        for name in (part.base, *part.variants):
            variant = plan.VARIANTS[name]
            rate = finished.rate(variant)
            assert rate is not None
            assert all(finished.losses(variant, variant.member(seed, rate)) for seed in plan.SEEDS)
    for name, variant in plan.VARIANTS.items():
        if variant.rate_of == name:
            octaves = finished.sweep(name)
            best = finished.best_octave(name)
            assert {best - 1, best, best + 1} <= set(octaves)
            assert abs(math.log2(plan.rate_at(name, best) / 1.1e-3)) <= 0.5


def test_a_sweep_continues_while_the_best_rate_is_at_its_edge(plan: Any) -> None:
    _, runs = play(plan, 500, best=3e-3)
    finished = plan.StudyPlan(runs)
    assert finished.best_octave("full") == 2 and set(finished.sweep("full")) >= {0, 1, 2, 3}
    assert finished.octaves_to_try("rotary") == []


def test_the_rates_of_a_run_that_diverged_are_worse_than_any(plan: Any) -> None:
    jobs, runs = play(plan, 2, best=6.78e-4)
    for run in runs:
        if run["member"]["learning_rate"] > 1e-3:
            run["valid_loss"] = None
    assert plan.StudyPlan(runs).best_octave("full") in (0, None)
    assert jobs[0].graph == "full"


def test_jobs_train_the_seeds_of_one_comparison_side_by_side_and_no_run_twice(plan: Any) -> None:
    jobs, runs = play(plan, 500, best=6.78e-4)
    assert max(len(job.members) for job in jobs) <= 3
    keys = [(r["graph"], json.dumps(r["member"]), r["upkeep"]) for r in runs]
    twice = {key for key in keys if keys.count(key) > 1}
    assert len(keys) - len(set(keys)) == 1
    assert {graph for graph, _, _ in twice} == {"full"}  # measures how reruns differ


def test_longer_runs_take_the_best_rate_of_shorter_ones_by_one_law(plan: Any) -> None:
    _, runs = play(plan, 500, best=1.1e-3)
    finished = plan.StudyPlan(runs)
    for name in ("full", "identity Q"):
        short, long = plan.VARIANTS[name], plan.VARIANTS[name + plan.LONGER]
        ratio = finished.rate(long) / finished.rate(short)
        assert ratio == pytest.approx((9600 / 4096) ** -0.32, rel=1e-2)
        assert {r["steps"] for r in finished.of(long, long.member(1, finished.rate(long)))} == {9600}


def test_the_record_of_the_first_series_goes_on_with_two_sweeps_and_a_rerun_beside_one(
    study: Callable[[str], ModuleType], plan: Any
) -> None:
    record = study("large_record").read_record(Path(__file__).parents[2] / "studies" / "large.jsonl")
    first = [r for r in record if r.get("first_series")]
    jobs = plan.StudyPlan(first).left()[:2]
    assert [(job.graph, [m.seed for m in job.members]) for job in jobs] == [("full", [0] * 3), ("identity Q", [0] * 2)]
    assert [m.learning_rate for m in jobs[0].members] == [0.000339, 0.00136, 0.000678]


def test_a_plan_that_was_stopped_goes_on_where_it_was(plan: Any) -> None:
    _, some = play(plan, 20, best=6.78e-4)
    jobs, _ = play(plan, 21, best=6.78e-4)
    assert plan.StudyPlan(json.loads(json.dumps(some))).left()[0] == jobs[20]


def test_the_list_counts_what_is_left(study: Callable[[str], ModuleType], plan: Any) -> None:
    large = study("large")
    said = large.listing([])
    assert len(said) == len(plan.PARTS) + 1 and "done" not in said[1]
    _, runs = play(plan, 500, best=6.78e-4)
    assert all(line.startswith("done") for line in large.listing(runs)[1:])


def test_every_shape_can_be_built_and_plans_have_equal_weights(study: Callable[[str], ModuleType]) -> None:
    shapes = study("large_shapes")
    full = shapes.counts("full")
    for name in (*shapes.EQUAL, *shapes.PLANS):
        assert shapes.counts(name)["non_embedding"] == full["non_embedding"]
    for name in ("identity Q, larger MLP", "identity K, larger MLP", "identity Q and V, larger MLP"):
        assert shapes.counts(name) == full
    biases = shapes.counts("all biases")["non_embedding"] - full["non_embedding"]
    assert biases == 12 * (4 * 512 + 2048 + 512 + 2 * 512) + 512


def test_a_record_survives_a_line_that_was_cut_off(study: Callable[[str], ModuleType], tmp_path: Path) -> None:
    record, file = study("large_record"), tmp_path / "record.jsonl"
    record.append(file, {"kind": "setting"})
    with file.open("a") as out:
        out.write('{"kind": "run", "graph"')
    assert [line["kind"] for line in record.read_record(file)] == ["setting"]
    record.append(file, {"kind": "run", "member": {}, "rest": 1})
    assert [line["kind"] for line in record.read_record(file)] == ["setting", "run"]
    file.write_bytes(file.read_bytes()[: -len(', "rest": 1}\n')])  # ends with a brace, and is not whole
    record.append(file, {"kind": "other"})
    assert [line["kind"] for line in record.read_record(file)] == ["setting", "other"]


def test_the_plan_of_the_bound_is_what_the_solver_says(study: Callable[[str], ModuleType]) -> None:
    record = json.loads((Path(__file__).parents[2] / "studies" / "s3_plans.json").read_text(encoding="utf-8"))
    profile, factors = record["profile"], record["pilot"]["factors"]
    twelve = [float(x) for x in np.interp(np.linspace(0, 5, 12), range(6), factors)]  # of a pilot with six layers
    shape, rules = UniformShape(512, 12, 8, 512), Rules(multiple=8, one_size=True)
    for saturation in ({}, {"saturation": twelve}):
        made = allocate(shape, profile["norms"], d_token=profile["d_token"], rules=rules, **saturation)
        layers = [(layer.heads, layer.size) for layer in made.layers]
        assert study("large_shapes").heads(layers) == study("large_shapes").PLANS["the bound"]


BARE = """
import importlib.machinery, runpy, sys
find = importlib.machinery.PathFinder.find_spec
without = {"typer", "rich", "tomli_w", "jaxtyping", "psutil", "accelerate", "markdown_it", "matplotlib"}
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.split(".")[0] in without else find(name, *more)
)
try:
    import typer
except ImportError:
    sys.argv = [sys.argv[1], "--list"]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_call_needs_torch_and_transformers_and_nothing_else_of_ours() -> None:
    large = Path(__file__).parents[2] / "studies" / "large.py"
    ran = subprocess.run([sys.executable, "-c", BARE, large.as_posix()], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "runs in the record" in ran.stdout


@pytest.mark.slow
def test_the_studies_run_record_and_go_on(
    study: Callable[[str], ModuleType], plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = study("large")
    tiny = {"d_model": 16, "n_layers": 1, "heads": 2, "context": 16, "vocab_size": 256}
    monkeypatch.setattr(large.large_shapes, "SIZES", tiny)
    monkeypatch.setattr(plan, "STEPS", 6)
    monkeypatch.setattr(large, "EXPECTED", 0.0)
    monkeypatch.setattr(plan, "PARTS", plan.PARTS[:2])
    one, other, record = tmp_path / "one.txt", tmp_path / "other.txt", tmp_path / "record.jsonl"
    one.write_text("the cat sat on the mat. " * 90)
    other.write_text("the dog sat on the log. " * 90)
    large.go_on(str(one), record, 200.0)
    runs = large.large_record.runs_of(large.large_record.read_record(record))
    assert not plan.StudyPlan(runs).left()
    assert all(set(r["rounded"]) == {"4", "3"} for r in runs)
    large.go_on(str(one), record, 200.0)
    assert len(large.large_record.runs_of(large.large_record.read_record(record))) == len(runs)
    with pytest.raises(DeadweightError, match="made with another text_sha256"):
        large.go_on(str(other), record, 1.0)


def played_record(study: Callable[[str], ModuleType], plan: Any) -> list[dict[str, Any]]:
    """A whole record in which heads of 32 are worse by 0.02 bits, all biases change nothing, and the rest is noise."""
    setting = study("large_record").read_record(Path(__file__).parents[2] / "studies" / "large.jsonl")[0]
    _, runs = play(plan, 500, best=6.78e-4)
    for place, run in enumerate(runs):
        jitter = 0.0002 * math.sin(7.0 * place)
        worse = {"16 × 32": 0.02, "all biases": 0.0}.get(run["graph"], 0.003) * math.log(2)
        more = {
            "rounded": {"4": 1.2, "3": 1.5 + jitter},
            "side_by_side": 3,
            "tokens_per_second": 5e5,
            "seconds": [90.0],
        }
        run |= {"valid_loss": run["valid_loss"] + jitter + (0.0 if run["graph"] == "full" else worse), **more}
    return [setting, *runs]


def test_the_page_judges_every_comparison_of_a_whole_record(study: Callable[[str], ModuleType], plan: Any) -> None:
    report = study("large_report")
    results = report.Results(played_record(study, plan))
    text = report.whole_page(results)
    assert "Not judged yet" not in text and "at-scale.svg" in text
    rows = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| ") and "±" in line}
    assert rows["16 × 32"].endswith("| worse |") and "+0.020" in rows["16 × 32"]
    assert rows["all biases"].endswith("| no difference that matters |")
    assert "Runs were repeated" in text and "3 at a time 1,500,000 bytes/s" in text


def test_two_seeds_are_not_judged(study: Callable[[str], ModuleType], plan: Any) -> None:
    report = study("large_report")
    record = [r for r in played_record(study, plan) if r.get("member", {}).get("seed") != 2 or r["graph"] != "16 × 32"]
    results = report.Results(record)
    heads = next(c for c in results.comparisons("S3") if c.variant == "16 × 32")
    assert heads.gap is None and heads.verdict == "not run"


def test_the_figure_shows_every_comparison(study: Callable[[str], ModuleType], plan: Any, tmp_path: Path) -> None:
    report = study("large_report")
    report.figure(report.Results(played_record(study, plan)), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 10_000


def test_advice_changes_with_the_record(study: Callable[[str], ModuleType], plan: Any) -> None:
    choices = study("choices")
    records = choices.Records()
    records.large = study("large_report").Results(played_record(study, plan))
    text = choices.page(records)
    assert "| heads: 16 × 32 instead of 8 × 64 | **Do not** |" in text
    assert "| heads: 4 × 128 instead of 8 × 64 | **A free choice** |" in text
    assert "| all biases | **Drop them** |" in text and "(upkeep: both) | **Drop it** |" in text
