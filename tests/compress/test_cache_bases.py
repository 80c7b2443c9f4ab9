"""The basis in which a cache is coded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadweight.compress.cache_bases import (
    RIDGE,
    best_basis,
    blocks_of,
    keys_basis,
    roots_of,
    value_roots,
    values_basis,
)
from deadweight.compress.cache_moments import SetMoments
from deadweight.compress.settings import STRUCTURES
from deadweight.slim.codes import STEP_ERRORS, STEPS, Quantiser

PAIRS = ((0, 3), (1, 4), (2, 5))


def moments(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(3 * size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return a.T @ a / len(a), b.T @ b / len(b)


def test_coordinates_are_uncorrelated_of_unit_variance_and_cost_what_is_said() -> None:
    covariance, gradient = moments(12)
    basis = best_basis(covariance, roots_of(gradient, [list(range(12))]))
    assert torch.allclose(basis.encode @ covariance @ basis.encode.T, torch.eye(12, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(basis.decode @ basis.encode, torch.eye(12, dtype=torch.float64), atol=1e-9)
    # leaving out coordinate i changes x by decode[:, i] z_i, which costs E (∂·δ)² = decode[:, i]ᵀ G decode[:, i]
    steadied = gradient + RIDGE * gradient.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    assert torch.allclose(basis.decode.T @ steadied @ basis.decode, torch.diag(basis.cost), atol=1e-9)
    assert bool((basis.cost.diff() <= 0).all())


def test_a_basis_that_is_not_weighed_by_gradients_costs_more() -> None:
    """Principal components of the covariance alone, at the same number of coordinates."""
    covariance, gradient = moments(12)
    basis = best_basis(covariance, roots_of(gradient, [list(range(12))]))
    values, vectors = torch.linalg.eigh(covariance)
    lost = vectors[:, :6]  # the six that vary least
    plain = float(((lost.T @ gradient @ lost).diagonal() * values[:6]).sum())
    assert float(basis.cost[6:].sum()) < plain


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s not in ("joint", "all")])
def test_blocks_divide_the_numbers_of_a_head_and_keep_pairs_together(structure: str) -> None:
    blocks = blocks_of(structure, 8, PAIRS)  # type: ignore[arg-type]
    assert sorted(place for block in blocks for place in block) == list(range(8))
    if structure != "scale":
        assert all(any({a, b} <= set(block) for block in blocks) for a, b in PAIRS)
    covariance, gradient = moments(8)
    basis = best_basis(covariance, roots_of(gradient, blocks))
    for numbers in basis.encode:
        reads = {i for i, x in enumerate(numbers.tolist()) if x}
        assert any(reads <= set(block) for block in blocks)


def test_finer_blocks_never_cost_less() -> None:
    """What is lost at half the coordinates, from the whole vector to single numbers."""
    covariance, gradient = moments(32)
    heads = {
        s: [[16 * h + i for i in b] for h in range(2) for b in blocks_of(s, 16, ())] for s in ("head", "pair", "scale")
    }  # type: ignore[arg-type]
    kinds = [[list(range(32))], *heads.values()]
    costs = [float(best_basis(covariance, roots_of(gradient, blocks)).cost[16:].sum()) for blocks in kinds]
    assert costs[0] < costs[1] < costs[2] and costs[0] < costs[3]


def related(size: int, keys: int) -> SetMoments:
    """Keys and values that are made of one hidden state of fewer dimensions, and some noise."""
    generator = torch.Generator().manual_seed(size)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mix, slopes = draw(size, size // 2), draw(3 * size, size)
    covariance = mix @ mix.T + 0.1 * torch.eye(size, dtype=torch.float64)
    return SetMoments(keys, torch.zeros(size, dtype=torch.float64), covariance, slopes.T @ slopes / len(slopes))


def test_values_are_predicted_as_least_squares_would_from_rounded_keys() -> None:
    """Against a regression on a million drawn tokens whose keys were rounded to three bits."""
    moments = related(12, 8)
    keys = keys_basis(moments, [list(range(8))], joint=False)
    states = torch.randn(1 << 20, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = states @ torch.linalg.cholesky(moments.covariance).T
    own, one = Quantiser.of(torch.full((1, 1, 8), 3), states), torch.ones((), dtype=torch.float64)
    coordinates = states[:, :8] @ keys.encode.T / STEPS[3]
    codes = STEPS[3] * own.values(own.codes(coordinates, one), one)[0]
    fitted = torch.linalg.lstsq(codes, states[:, 8:]).solution.T
    errors = torch.full((8,), STEP_ERRORS[3], dtype=torch.float64)
    values = values_basis(moments, keys, errors, value_roots(moments))
    assert torch.allclose(values.predict, fitted, atol=0.01)  # sampling: 1/√(1<<20), times a few
    missed = states[:, 8:] - codes @ values.predict.T
    spread = values.basis.encode @ torch.cov(missed.T) @ values.basis.encode.T
    assert torch.allclose(spread, torch.eye(4, dtype=torch.float64), atol=0.02)


def test_a_prediction_lowers_the_cost_of_values_and_keys_without_bits_predict_nothing() -> None:
    moments = related(16, 8)
    keys = keys_basis(moments, [list(range(8))], joint=False)
    alone = best_basis(moments.covariance[8:, 8:], value_roots(moments))
    exact, coarse, none = (
        values_basis(moments, keys, torch.full((8,), e, dtype=torch.float64), value_roots(moments))
        for e in (0.0, 0.36, 1.0)
    )
    assert float(exact.basis.cost.sum()) < float(coarse.basis.cost.sum()) < float(alone.cost.sum())
    assert torch.allclose(none.basis.cost, alone.cost) and float(none.predict.abs().max()) < 1e-9


def test_a_joint_basis_costs_less_than_two_of_its_parts() -> None:
    """At half of the coordinates, of keys and values that depend on each other."""
    moments = related(16, 8)
    joint = keys_basis(moments, [list(range(16))], joint=True)
    parts = [
        best_basis(moments.covariance[a:b, a:b], roots_of(moments.gradient[a:b, a:b], [list(range(8))]))
        for a, b in ((0, 8), (8, 16))
    ]
    apart = torch.cat([p.cost for p in parts]).sort(descending=True).values
    assert len(joint.cost) == 16 and float(joint.cost[8:].sum()) < 0.5 * float(apart[8:].sum())
