"""The study of growing key biases: its conditions differ in what they say, and its numbers mean what the page says."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

TEXT = np.frombuffer(b"the cat sat on the mat, and the dog sat on the log. " * 120, dtype=np.uint8)


@pytest.fixture
def drift(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("s1_key_drift")


def test_in_float64_the_key_bias_stays_where_it_is_and_the_query_bias_moves(drift: ModuleType) -> None:
    run = drift.train_one(drift.CONDITIONS["float64"], 0, 20, TEXT)
    assert run["log"][-1][1] < 1e-6 * run["query_norm"]  # its gradient is rounding, far below Adam's ε
    assert run["coherence"] <= 1 + 1e-9 and len(run["alignment"]) == 4


def test_a_model_without_the_key_bias_begins_with_the_same_weights(drift: ModuleType) -> None:
    one, other = (drift.make_model(drift.CONDITIONS[n], 3) for n in ("float32", "float32, no key bias"))
    mine, theirs = one.state_dict(), other.state_dict()
    assert {n.rpartition("attention.")[2] for n in mine.keys() - theirs.keys()} == {"key.bias"}
    assert all(torch.equal(mine[n], theirs[n]) for n in theirs)


def test_weight_decay_and_epsilon_reach_the_optimizer(drift: ModuleType) -> None:
    made = {
        n: drift.make_optimizer(drift.make_model(c, 0), c) for n, c in drift.CONDITIONS.items() if c.device == "cpu"
    }
    assert [g["weight_decay"] for g in made["float32, decay 0.1"].param_groups] == [0.1, 0.1]
    assert [g["weight_decay"] for g in made["float32"].param_groups] == [0.1, 0.0]
    assert made["float64, ε 1e-30"].param_groups[0]["eps"] == 1e-30
    assert isinstance(made["bfloat16, SGD"], torch.optim.SGD)


def test_only_keys_are_rounded_and_a_constant_costs_their_digits(drift: ModuleType) -> None:
    torch.manual_seed(0)
    output = torch.randn(2, 5, 24)
    rounded = drift.key_rounding(8)(torch.nn.Identity(), None, output)
    assert torch.equal(rounded[..., :8], output[..., :8]) and torch.equal(rounded[..., 16:], output[..., 16:])
    errors = []
    for shift in (0.0, 100.0):
        moved = output.clone()
        moved[..., 8:16] += shift
        errors.append(float((drift.key_rounding(8)(torch.nn.Identity(), None, moved) - moved).abs().max()))
    assert errors[1] > 10 * errors[0]


def test_a_random_walk_grows_with_the_root_of_the_steps(study: Callable[[str], ModuleType]) -> None:
    page = study("s1_key_drift_page")
    assert page.walk(4e-3, 1000, 128) == pytest.approx(4e-3 * (1000 * 128) ** 0.5)
    log = [[n, 0.1 * n**0.5, 0.0, 0.0] for n in range(50, 1001, 50)]
    assert page.exponent({"log": log}) == pytest.approx(0.5)
