"""The learning rate rises, holds and falls as asked."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train

BASE = {"steps": 100, "warmup": 10, "learning_rate": 1.0, "final_share": 0.1}


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_it_warms_up_to_the_top_and_ends_near_the_final_share(schedule: str) -> None:
    rates = [learning_rate(Train(**BASE, schedule=schedule), step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates.index(max(rates)) <= 10
    assert all(a < b for a, b in pairwise(rates[:10]))
    assert rates[-1] == pytest.approx(0.1, abs=0.05)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_wsd_stays_before_it_falls() -> None:
    train = Train(**BASE, schedule="wsd", decay_share=0.2)
    assert {learning_rate(train, s) for s in range(10, 80)} == {1.0}
    assert learning_rate(train, 90) == pytest.approx(0.55)
