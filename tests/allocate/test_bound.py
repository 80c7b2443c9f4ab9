"""The bound, against the published curve and by hand."""

from __future__ import annotations

import math

import pytest

from deadweight.allocate.bound import HeadGroup, Task, curve, error, lag_errors
from deadweight.errors import DeadweightError

PUBLISHED = {1: 1.326, 8: 0.166, 9: 0.481, 10: 0.580, 20: 0.841, 80: 0.965}  # D = 128, d = 16, one lag
ONE_LAG = Task((1.0,), d_token=16)


def test_the_published_curve_comes_out_to_three_digits() -> None:
    assert [round(e, 3) for e in curve(ONE_LAG, 128, list(PUBLISHED))] == list(PUBLISHED.values())


def test_whole_sizes_would_give_another_curve() -> None:
    assert error(ONE_LAG, [HeadGroup(9, 128 // 9)]) == pytest.approx(0.501, abs=1e-3)


def test_the_curve_is_u_shaped_with_its_minimum_at_eight_heads() -> None:
    found = curve(ONE_LAG, 128, range(1, 129))
    assert found.index(min(found)) == 7
    assert found[:8] == sorted(found[:8], reverse=True) and found[7:] == sorted(found[7:])


def test_every_term_of_the_bound_is_there() -> None:
    task = Task((2.0, 1.0, 0.5), d_token=4, scale=3.0, epsilon=0.1)
    expected = 6 * (1.1 * math.sqrt(3 / 4) + 1.3 * math.exp(0.02) / 2) + 3 * 1.3 * math.exp(0.04) / 5 + 1.5
    assert error(task, [HeadGroup(2, 1), HeadGroup(5, 7)]) == pytest.approx(expected, rel=1e-14)
    assert lag_errors(task, [HeadGroup(2, 1), HeadGroup(5, 7)])[2] == 1.5  # a lag without heads


def test_heads_larger_than_a_token_cut_nothing_off() -> None:
    assert error(ONE_LAG, [HeadGroup(3, 16)]) == error(ONE_LAG, [HeadGroup(3, 17)]) < error(ONE_LAG, [HeadGroup(3, 15)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"profile": (1.0, -0.5)}, "found -0.5 at lag 2"),
        ({"profile": (float("nan"),)}, "found nan at lag 1"),
        ({"profile": (1.0, float("inf"))}, "found inf at lag 2"),
        ({"profile": ()}, "found no lags"),
        ({"profile": (0.0, 0.0)}, "found 2 lags, all zero"),
        ({"d_token": 0}, "token dimension of 0"),
        ({"scale": 0.0}, "found B = 0.0"),
        ({"epsilon": -1.0}, "found epsilon = -1.0"),
        ({"epsilon": float("nan")}, "found epsilon = nan"),
    ],
)
def test_an_invalid_task_is_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(DeadweightError, match=words):
        Task(**({"profile": (1.0,), "d_token": 4} | change))


def test_more_groups_than_lags_are_refused() -> None:
    with pytest.raises(DeadweightError, match="heads for 2 lags; expected at most the 1"):
        error(ONE_LAG, [HeadGroup(1, 1), HeadGroup(1, 1)])
