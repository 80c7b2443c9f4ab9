"""The best dimensions are the best: against random ones, other rotary pairs, and all ways to spend a budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deadweight.compress.head_choice import usual_step
from deadweight.compress.knapsack import Choice, best_sizes, same_share
from deadweight.compress.rotary_pairs import best_pairs
from deadweight.compress.subspace import best_subspace
from deadweight.errors import DeadweightError


def moments(heads: int, size: int, seed: int) -> Tensor:
    x = torch.randn(heads, size, 3 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(0, -1, size, dtype=torch.float64)[:, None]
    return x @ x.transpose(1, 2) / (3 * size)


def loss_of(basis: Tensor, z: Tensor, g: Tensor) -> float:
    """½ Σ tr(G E Z Eᵀ) for the regression on these rows, spelled out."""
    total = 0.0
    for moment, gradient in zip(z, g, strict=True):
        back = moment @ basis.T @ torch.linalg.inv(basis @ moment @ basis.T)
        error = torch.eye(len(moment), dtype=torch.float64) - back @ basis
        total += float(0.5 * torch.trace(gradient @ error @ moment @ error.T))
    return total


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_for_one_head_no_other_subspace_loses_less(rank: int) -> None:
    z, g = moments(1, 6, 0), moments(1, 6, 1)
    found = best_subspace(z, g)
    assert loss_of(found.basis[:rank], z, g) == pytest.approx(float(found.loss[rank]), abs=1e-5 * float(found.loss[0]))
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        near = found.basis[:rank] + 0.1 * torch.randn(rank, 6, dtype=torch.float64, generator=generator)
        assert loss_of(near, z, g) > float(found.loss[rank]) - 1e-5 * float(found.loss[0])


def test_the_gradients_matter() -> None:
    """The negative neighbour: directions with much variance and no gradient are dropped."""
    z = torch.diag(torch.tensor([9.0, 1.0], dtype=torch.float64))[None]
    g = torch.diag(torch.tensor([0.01, 1.0], dtype=torch.float64))[None]
    kept = best_subspace(z, g).basis[0]
    assert abs(kept[1]) > 10 * abs(kept[0])
    plain = best_subspace(z, torch.eye(2, dtype=torch.float64)[None]).basis[0]
    assert abs(plain[0]) > 10 * abs(plain[1])


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_heads_that_share_a_subspace_are_reconstructed_separately(rank: int) -> None:
    z, g = moments(3, 5, 3), moments(3, 5, 4)
    found = best_subspace(z, g)
    if rank:
        assert loss_of(found.basis[:rank], z, g) == pytest.approx(
            float(found.loss[rank]), abs=1e-5 * float(found.loss[0])
        )
        assert found.back(rank).shape == (3, 5, rank)
    assert float(found.loss[5]) < 1e-5 * float(found.loss[0])
    assert bool((found.loss.diff() <= 1e-12).all())


def test_moments_that_are_singular_or_zero_do_no_harm() -> None:
    z = torch.zeros(2, 4, 4, dtype=torch.float64)
    z[0, 0, 0] = 1.0
    found = best_subspace(z, torch.zeros_like(z))
    assert bool(torch.isfinite(found.basis).all()) and bool(torch.isfinite(found.back(2)).all())
    assert float(found.loss.abs().max()) < 1e-6


def test_correlated_rotary_pairs_compensate_for_each_other() -> None:
    """Two pairs with the same contribution: dropping one costs nothing if the other may be scaled."""
    answers = torch.randn(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    along = torch.stack([answers[:, 0], answers[:, 0], answers[:, 1]], 1)
    both = torch.cat([along, 0.1 * answers[:, [2, 2, 2]]], 1)
    moment = both.T @ both / 500
    free = best_pairs(moment, 1, 3)
    uncompensated = 0.5 * float(moment.diagonal()[:3].min())  # what dropping one costs if the others stay as they are
    assert float(free.loss[2]) < 0.05 * uncompensated
    assert 2 in free.kept(2) and float(free.change[2][0, 0, free.kept(2)[0]]) == pytest.approx(1.0, abs=0.1)
    assert float(free.loss[0]) == pytest.approx(0.5 * float(moment[:3, :3].sum()))
    assert float(free.loss[3]) == 0.0


def test_without_correlation_the_pairs_that_cost_least_go_first_unless_an_order_is_given() -> None:
    moment = torch.diag(torch.tensor([3.0, 1.0, 2.0, 1e-9, 1e-9, 1e-9], dtype=torch.float64))
    found = best_pairs(moment, 1, 3)
    assert found.order == (1, 2, 0) and found.kept(2) == (0, 2)
    assert float(found.loss[2]) == pytest.approx(0.5)
    asked = best_pairs(moment, 1, 3, (0, 1, 2))
    assert asked.order == (0, 1, 2) and float(asked.loss[2]) == pytest.approx(1.5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_knapsack_finds_what_trying_everything_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    choices = []
    for _ in range(draw(1, 5)):
        sizes = tuple(range(1, draw(2, 5)))
        cost = draw(1, 4)
        losses = torch.rand(len(sizes), generator=generator, dtype=torch.float64).sort(descending=True).values
        choices.append(Choice(sizes, tuple(s * cost for s in sizes), tuple(losses.tolist())))
    least, most = (sum(pick(c.costs) for c in choices) for pick in (min, max))
    budget = draw(least, most + 2)
    picked, loss = best_sizes(choices, budget)
    options = [list(zip(c.sizes, c.costs, c.losses, strict=True)) for c in choices]
    tried = [
        sum(x[2] for x in combination)
        for combination in itertools.product(*options)
        if sum(x[1] for x in combination) <= budget
    ]
    assert loss == pytest.approx(min(tried))
    assert sum(c.costs[c.sizes.index(p)] for c, p in zip(choices, picked, strict=True)) <= budget
    assert same_share(choices, most)[1] >= best_sizes(choices, most)[1] - 1e-12


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(DeadweightError, match="found a budget of 1; the least that the heads can be cut to costs 2"):
        best_sizes([Choice((1, 2), (2, 4), (1.0, 0.0))], 1)


def test_a_share_below_the_least_of_one_space_leaves_it_at_its_least() -> None:
    coarse = Choice((4, 8), (4, 8), (1.0, 0.0))
    fine = Choice(tuple(range(1, 9)), tuple(range(1, 9)), tuple(8.0 - s for s in range(1, 9)))
    assert same_share([coarse, fine], 5)[0] == (4, 1)
    assert same_share([coarse, fine], 9)[0] == (4, 5)
    with pytest.raises(DeadweightError, match="no equal share"):
        same_share([coarse, fine], 4)


@pytest.mark.parametrize(("size", "step"), [(64, 4), (128, 8), (256, 16), (8, 1)])
def test_sizes_come_in_steps_of_a_sixteenth_of_a_head(size: int, step: int) -> None:
    assert usual_step(size) == step
