"""Bits for every group of coordinates: the least loss within a budget."""

from __future__ import annotations

import itertools

import pytest
import torch

from deadweight.compress.bit_allocation import allocate_bits, group_losses, runs_of
from deadweight.slim.codes import LEVEL_ERRORS


@pytest.mark.parametrize("budget", [0, 1, 5, 9, 13, 24, 100])
def test_the_allocation_is_the_best_of_all(budget: int) -> None:
    """Against every combination of widths, for costs of three groups and losses that are not convex."""
    generator = torch.Generator().manual_seed(budget)
    losses = group_losses(torch.rand(24, generator=generator).sort(descending=True).values)
    losses[1] = torch.rand(9, generator=generator).sort(descending=True).values
    widths, loss = allocate_bits(losses, budget)
    options = itertools.product(range(9), repeat=3)
    best = min(float(sum(losses[g, w] for g, w in enumerate(o))) for o in options if sum(o) <= budget)
    assert int(widths.sum()) <= budget
    assert loss == pytest.approx(best) == pytest.approx(float(sum(losses[g, w] for g, w in enumerate(widths))))


def test_a_group_that_is_not_full_counts_what_it_has() -> None:
    losses = group_losses(torch.tensor([4.0, 2.0, 1.0]))
    assert losses.shape == (1, 9) and float(losses[0, 3]) == pytest.approx(0.5 * 7 * LEVEL_ERRORS[3])


def test_runs_list_the_widest_coordinates_first_and_fill_up_the_last_group() -> None:
    runs, order = runs_of([6, 2, 0, 6, 2], 36)
    assert runs == (0, 0, 16, 0, 0, 0, 16, 0)
    assert order[:16] == [*range(8), *range(24, 32)] and order[16:24] == [*range(8, 16)]
    assert order[24:] == [32, 33, 34, 35, -1, -1, -1, -1]


def test_a_budget_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="budget of -1"):
        allocate_bits(group_losses(torch.ones(8)), -1)
