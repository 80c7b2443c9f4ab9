"""The knapsack solver: one size for each space, with the least predicted loss under one budget, exactly.

Each space (the values of a key head, its rotary pairs, its non-rotary dimensions) may keep any of some sizes, with a
cost and a predicted loss for each. The best choice is a multiple-choice knapsack, solved by dynamic programming over
the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from deadweight.errors import DeadweightError


@dataclass(frozen=True)
class Choice:
    """One space: for each size that it may keep, what that costs and what loss is predicted. Sizes rise."""

    sizes: tuple[int, ...]
    costs: tuple[int, ...]
    losses: tuple[float, ...]


def best_sizes(choices: Sequence[Choice], budget: int) -> tuple[tuple[int, ...], float]:
    """The size for each space with the least total loss at a total cost of at most the budget, and that loss."""
    unit = gcd(*(cost for choice in choices for cost in choice.costs)) or 1
    least = sum(min(choice.costs) for choice in choices)
    if budget < least:
        raise DeadweightError(f"found a budget of {budget:,}; the least that the heads can be cut to costs {least:,}")
    room = budget // unit
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken: list[Tensor] = []
    for choice in choices:
        best, which = one_more(best, choice, unit)
        taken.append(which)
    picks = []
    at = room
    for choice, which in zip(reversed(choices), reversed(taken), strict=True):
        option = int(which[at])
        picks.append(choice.sizes[option])
        at -= choice.costs[option] // unit
    return tuple(reversed(picks)), float(best[room])


def one_more(best: Tensor, choice: Choice, unit: int) -> tuple[Tensor, Tensor]:
    """The least loss within each budget with one more space, and which of its options gives it."""
    new = torch.full_like(best, float("inf"))
    which = torch.zeros(len(best), dtype=torch.int16)
    for option, (cost, loss) in enumerate(zip(choice.costs, choice.losses, strict=True)):
        need = cost // unit
        if need < len(best):
            with_it = torch.full_like(best, float("inf"))
            with_it[need:] = best[: len(best) - need] + loss
            better = with_it < new
            new, which = torch.where(better, with_it, new), which.masked_fill(better, option)
    return new, which


def same_share(choices: Sequence[Choice], budget: int) -> tuple[tuple[int, ...], float]:
    """Every space keeps the same share of its largest size, or its least: the largest share that the budget allows."""
    steps = sorted({size / choice.sizes[-1] for choice in choices for size in choice.sizes if choice.sizes[-1]})
    for share in reversed(steps):
        fitting = [[i for i, s in enumerate(c.sizes) if s <= share * c.sizes[-1] + 1e-9] for c in choices]
        picks = [max(options, default=0) for options in fitting]
        if sum(c.costs[i] for c, i in zip(choices, picks, strict=True)) <= budget:
            sizes = tuple(c.sizes[i] for c, i in zip(choices, picks, strict=True))
            return sizes, sum(c.losses[i] for c, i in zip(choices, picks, strict=True))
    raise DeadweightError("no equal share of all heads fits the budget")
