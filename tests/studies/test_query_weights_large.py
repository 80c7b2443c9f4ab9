"""The large size of the query study: the order of its runs, its record, and what is concluded from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deadweight.errors import DeadweightError
from deadweight.train.gpu_queue import TrainingJob

BEST = 1.1e-3  # the learning rate that the played runs like


@pytest.fixture
def large(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("s2_query_weights").s2_large


@pytest.fixture
def claims(study: Callable[[str], ModuleType]) -> Any:
    return study("s2_claims")


def played(job: TrainingJob, loss: float) -> dict[str, Any]:
    return {"kind": "run", "graph": job.graph, "steps": job.steps, "member": asdict(job.member), "valid_loss": loss}


def play(large: ModuleType, count: int, best: float = BEST) -> list[dict[str, Any]]:
    """The first runs of the plan, with losses that are a parabola over the logarithm of the rate."""
    runs: list[dict[str, Any]] = []
    while len(runs) < count and (left := large.StudyPlan(runs).left()):
        job = left[0]
        octaves = math.log2(job.member.learning_rate / best / (job.steps / large.SHORT) ** large.LAW)
        runs.append(played(job, 1.0 + 0.02 * octaves**2 + 0.01 * (job.graph != "full")))
    return runs


def test_a_shape_is_swept_before_it_is_judged_and_all_shapes_alike(large: ModuleType) -> None:
    runs = play(large, 300)
    assert not large.StudyPlan(runs).left()
    for shape in large.SHAPES:
        first = next(i for i, r in enumerate(runs) if large.shape_of(r) == shape and r["steps"] > large.SHORT)
        swept = large.sweep(runs[:first], shape)
        assert set(swept) == set(large.RATES) and not large.rates_to_try(swept)
        assert large.optimum(swept) == pytest.approx(BEST, rel=0.01)  # rates are rounded to three digits
        rates = {r["member"]["learning_rate"] for r in runs if r["graph"] == shape and r["steps"] == large.LONG}
        assert rates == {large.rate_for(swept, large.LONG)}
    seen = [(r["graph"], r["steps"], json.dumps(r["member"])) for r in runs]
    assert len(seen) == len(set(seen))


def test_a_sweep_goes_on_while_the_best_rate_is_at_its_edge(large: ModuleType) -> None:
    assert large.rates_to_try({5e-4: 1.0, 1e-3: 1.1, 2e-3: 1.2}) == [2.5e-4]
    assert large.rates_to_try({5e-4: 1.2, 1e-3: 1.1, 2e-3: 1.0}) == [4e-3]
    assert large.rates_to_try({5e-4: 1.2, 1e-3: 1.1, 2e-3: math.inf}) == []
    assert large.optimum({5e-4: 1.2, 1e-3: 1.1, 2e-3: math.inf}) == 1e-3
    assert large.optimum({5e-4: 1.2, 1e-3: 1.1, 2e-3: 1.15}) > 1e-3


def test_an_interrupted_plan_resumes_where_it_stopped(large: ModuleType) -> None:
    some = play(large, 20)
    again = json.loads(json.dumps(some))
    assert large.StudyPlan(again).left() == large.StudyPlan(some).left()
    assert large.StudyPlan(again).left()[0] not in large.StudyPlan(play(large, 21)).left()


def test_a_record_of_another_text_is_refused(
    large: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"d_model": 16, "n_layers": 1, "heads": 2, "context": 16, "vocab_size": 256}
    monkeypatch.setattr(large, "SIZES", tiny)
    monkeypatch.setattr(large, "SHAPES", {"full": {}})
    monkeypatch.setattr(
        large, "Queue", lambda *_, **__: type("Idle", (), {"run": lambda _: None, "gains": [0.5, 0.6]})()
    )
    one, other, record = tmp_path / "one.txt", tmp_path / "other.txt", tmp_path / "record.jsonl"
    one.write_text("the cat sat on the mat. " * 60)
    other.write_text("the dog sat on the log. " * 60)
    large.go_on(str(one), record, 1.0, print)
    large.go_on(str(one), record, 1.0, print)
    kinds = [line["kind"] for line in large.read_record(record)]
    assert kinds == ["setting", "side by side"] * 2
    with pytest.raises(DeadweightError, match="made with another text_sha256"):
        large.go_on(str(other), record, 1.0, print)


def test_flops_are_those_of_matrices_and_of_the_tokens_seen(large: ModuleType) -> None:
    layer = 512 * 512 * 4 + 2 * 512 * 2048
    assert large.counts("full")["flops_per_token"] == 6 * (12 * layer + 256 * 512) + 12 * 12 * 512 * 513 // 2
    for shape in ("identity Q, larger MLP", "identity K, larger MLP", "identity Q and V, larger MLP"):
        assert large.counts(shape) == large.counts("full")
    assert large.counts("full, smaller MLP") == large.counts("identity V")


def test_nothing_is_judged_on_fewer_than_three_pairs(claims: Any) -> None:
    assert claims.difference({0: 1.0, 1: 1.1, 2: 1.2}, {0: 0.9, 1: 1.0, 5: 1.0}) is None
    found = claims.difference({0: 1.0, 1: 1.1, 2: 1.3}, {2: 1.0, 1: 1.0, 0: 1.0})
    assert (found.mean, found.seeds) == (pytest.approx(0.4 / 3), 3)
    assert found.error == pytest.approx(math.sqrt(sum((x - 0.4 / 3) ** 2 for x in (0.0, 0.1, 0.3)) / 2 / 3))


def test_equality_holds_or_not_by_the_interval_and_what_matters(claims: Any) -> None:
    judge = lambda mean, error, seeds=3: claims.verdict_of_equality(claims.Difference(mean, error, seeds))  # noqa: E731
    assert judge(0.0005, 0.001) == "Holds"
    assert judge(-0.02, 0.001) == "Holds"
    assert judge(0.003, 0.001) == "Not decided: worse by 0.007 at most"
    assert judge(0.003, 0.001, seeds=6) == "Not seen here"
    assert judge(0.01, 0.001) == "Not seen here"


def test_the_slope_is_that_of_a_power_law(claims: Any, large: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    record = claims.Large.__new__(claims.Large)
    law = {n: dict.fromkeys(range(3), 0.7 + 2.0 * n ** (-0.2)) for n in (large.SHORT, large.MIDDLE)}
    monkeypatch.setattr(record, "bits", lambda shape, steps: law[steps], raising=False)
    monkeypatch.setattr(claims, "ASYMPTOTES", (0.7,))
    low, high = record.slope(large.MIDDLE)
    assert low == high == pytest.approx(0.2 * 2.0 * large.MIDDLE**-0.2)
    assert record.worth(large.MIDDLE, 0.9)[0] == pytest.approx(-low * math.log(0.9))
