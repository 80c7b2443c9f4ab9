"""The skip connection: what absorbs it exactly, and what falls one unit short."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_constructions_are_exact_and_their_neighbours_are_not(study: Callable, activation: str) -> None:
    told = study("s2_skips").constructions(4, 9, activation, seed=0)
    for name in ("control", "between", "m + d", "m + 2d"):
        assert told[name] < 1e-12, name
    for name in ("control, one unit not flipped", "generic, same flips", "between, one unit less", "m + d - 1"):
        assert told[name] > 1e-3, name


def test_sums_of_opposite_jacobians_are_constant_and_ranks_are_full(study: Callable) -> None:
    told = study("s2_skips").ranks(2, 4, "gelu", draws=20)
    assert told["lowest_rank"] == 2 and told["nearest"] > 0.1
    assert told["jacobian_sum_error"] < 1e-12 and told["control_distance"] < 1e-12


def test_the_jacobian_of_the_fit_is_the_derivative_of_its_residuals(study: Callable) -> None:
    s2, random = study("s2_skips"), torch.Generator().manual_seed(0)
    f = s2.random_mlp(2, 3, "gelu", random)
    x = torch.randn(5, 2, dtype=torch.float64, generator=random)
    up, down = s2.starting(f, 1, 1, random)
    whole = torch.autograd.functional.jacobian(
        lambda u, d: s2.residuals((u, d), x, f(x), "gelu").flatten(1), (up, down)
    )
    expected = torch.cat([whole[0][0, :, 0].flatten(1), whole[1][0, :, 0].flatten(1)], 1)
    assert torch.allclose(s2.jacobian((up, down), x, "gelu")[0], expected)


def test_a_record_is_written_and_read(study: Callable, tmp_path: Path) -> None:
    s2, out = study("s2_skips"), tmp_path / "record.json"
    s2.run(out=out, seeds=1, starts=8, iterations=3, draws=2, largest=2)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {"d", "m", "best"} <= set(record["fits"][0])
    assert "## The theorem" in s2.written(record)
