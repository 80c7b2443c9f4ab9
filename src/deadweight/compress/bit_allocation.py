"""How many bits each coordinate gets: the least predicted loss for a number of bytes, exactly.

Coordinates are taken in groups of eight of similar cost, because a run of codes is a multiple of eight. A group with b
bits takes b bytes of every token and loses ½ Σ cost · D(b), D the error of rounding a normal variable. One budget for
all groups of all layers, keys and values together, is a multiple-choice knapsack, solved by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deadweight.slim.codes import LEVEL_ERRORS
from deadweight.slim.format import GROUP, WIDTHS

NONE = float("inf")


def group_losses(cost: Tensor) -> Tensor:
    """The predicted loss of every group of eight coordinates at 0 to 8 bits, (groups, 9); costs fall."""
    padded = torch.nn.functional.pad(cost.double(), (0, -len(cost) % GROUP))
    return 0.5 * padded.view(-1, GROUP).sum(1)[:, None] * torch.tensor(LEVEL_ERRORS, dtype=torch.float64)


def allocate_bits(losses: Tensor, budget: int) -> tuple[Tensor, float]:
    """The width of every group with the least total loss at a total of at most `budget` bits per coordinate of a group.

    `losses` is (groups, widths), where width b costs b. Returns the widths and the total loss.
    """
    groups, options = losses.shape
    room = min(budget, groups * (options - 1))
    if room < 0:
        raise ValueError(f"found a budget of {budget} bytes; expected 0 or more")
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = torch.zeros(groups, room + 1, dtype=torch.uint8)
    for index in range(groups):
        best, taken[index] = one_more(best, losses[index])
    widths = torch.zeros(groups, dtype=torch.long)
    left = room
    for index in reversed(range(groups)):
        widths[index] = int(taken[index, left])
        left -= int(widths[index])
    return widths, float(best[room])


def one_more(best: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """The least loss within each budget with one more group, and the width that gives it."""
    shifted = torch.full((len(losses), len(best)), NONE, dtype=torch.float64)
    for width in range(min(len(losses), len(best))):
        shifted[width, width:] = best[: len(best) - width] + losses[width]
    least, which = shifted.min(0)
    return least, which.to(torch.uint8)


def runs_of(widths: Sequence[int], size: int) -> tuple[tuple[int, ...], list[int]]:
    """From the widths of groups: how many coordinates have each of `WIDTHS` bits, and the coordinates in that order.

    The last group of a set whose size is no multiple of eight is filled up with −1, which stands for no coordinate.
    """
    runs, order = [], []
    for width in WIDTHS:
        members = [g for g, w in enumerate(widths) if w == width]
        runs.append(GROUP * len(members))
        order += [i if i < size else -1 for g in members for i in range(g * GROUP, (g + 1) * GROUP)]
    return tuple(runs), order
