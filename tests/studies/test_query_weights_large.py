"""The first series of the query study at 38 M parameters: its sweeps, and what is concluded from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def large(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("s2_query_weights").s2_large


@pytest.fixture
def claims(study: Callable[[str], ModuleType]) -> Any:
    return study("s2_claims")


def test_a_sweep_goes_on_while_the_best_rate_is_at_its_edge(large: ModuleType) -> None:
    assert large.rates_to_try({5e-4: 1.0, 1e-3: 1.1, 2e-3: 1.2}) == [2.5e-4]
    assert large.rates_to_try({5e-4: 1.2, 1e-3: 1.1, 2e-3: 1.0}) == [4e-3]
    assert large.rates_to_try({5e-4: 1.2, 1e-3: 1.1, 2e-3: math.inf}) == []
    assert large.optimum({5e-4: 1.2, 1e-3: 1.1, 2e-3: math.inf}) == 1e-3
    assert large.optimum({5e-4: 1.2, 1e-3: 1.1, 2e-3: 1.15}) > 1e-3


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
