"""The basis in which a cache is coded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadweight.compress.basis import RIDGE, STRUCTURES, best_basis, blocks_of

PAIRS = ((0, 3), (1, 4), (2, 5))


def moments(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(3 * size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.randn(size, generator=generator, dtype=torch.float64), a.T @ a / len(a), b.T @ b / len(b)


def test_coordinates_are_uncorrelated_of_unit_variance_and_cost_what_is_said() -> None:
    mean, covariance, gradient = moments(12)
    basis = best_basis(mean, covariance, gradient, [list(range(12))])
    assert torch.allclose(basis.encode @ covariance @ basis.encode.T, torch.eye(12, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(basis.decode @ basis.encode, torch.eye(12, dtype=torch.float64), atol=1e-9)
    # leaving out coordinate i changes x by decode[:, i] z_i, which costs E (∂·δ)² = decode[:, i]ᵀ G decode[:, i]
    steadied = gradient + RIDGE * gradient.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    assert torch.allclose(basis.decode.T @ steadied @ basis.decode, torch.diag(basis.cost), atol=1e-9)
    assert bool((basis.cost.diff() <= 0).all())


def test_a_basis_that_is_not_weighed_by_gradients_costs_more() -> None:
    """Principal components of the covariance alone, at the same number of coordinates."""
    mean, covariance, gradient = moments(12)
    basis = best_basis(mean, covariance, gradient, [list(range(12))])
    values, vectors = torch.linalg.eigh(covariance)
    lost = vectors[:, :6]  # the six that vary least
    plain = float(((lost.T @ gradient @ lost).diagonal() * values[:6]).sum())
    assert float(basis.cost[6:].sum()) < plain


@pytest.mark.parametrize("structure", STRUCTURES)
def test_blocks_divide_the_numbers_of_all_heads_and_keep_pairs_together(structure: str) -> None:
    blocks = blocks_of(structure, 2, 8, PAIRS)  # type: ignore[arg-type]
    assert sorted(place for block in blocks for place in block) == list(range(16))
    if structure != "scale":
        for head in (0, 8):
            for a, b in PAIRS:
                assert any({head + a, head + b} <= set(block) for block in blocks)
    mean, covariance, gradient = moments(16)
    basis = best_basis(mean, covariance, gradient, blocks)
    for row in basis.encode:
        reads = {i for i, x in enumerate(row.tolist()) if x}
        assert any(reads <= set(block) for block in blocks)


def test_finer_blocks_never_cost_less() -> None:
    """What is lost at half the coordinates, from the whole vector to single numbers."""
    mean, covariance, gradient = moments(32)
    costs = [
        float(best_basis(mean, covariance, gradient, blocks_of(s, 2, 16, ())).cost[16:].sum())
        for s in ("all", "head", "pair", "scale")
    ]
    assert costs[0] < costs[1] < costs[2] and costs[0] < costs[3]
