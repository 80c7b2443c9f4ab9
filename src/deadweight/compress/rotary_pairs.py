"""Which rotary pairs of a head to keep.

A rotary position rotates each pair of dimensions by its own angle, so a pair is kept or dropped whole. Each query head
may stretch and turn its own kept pairs (the commutant of the rotations), which recovers part of what is lost. With x
the vector of all stretchings and turnings, the predicted loss is ½ xᵀFx, where F is the second moment of the
derivatives of the loss by each of them. Dropping a pair fixes its stretchings at −1 and its turnings at 0; the others
are free. Which pair to drop next, and how the others compensate, is the optimal brain surgeon's formula for a block of
parameters (Hassibi and Stork, 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight import threads

DAMPING = 1e-2  # of the mean variance of stretchings: large corrections are outside what second order can promise


@dataclass(frozen=True)
class PairSpace:
    """`order[n:]` are the pairs that remain when n are dropped; `loss[k]` is predicted for k kept pairs."""

    order: tuple[int, ...]
    loss: Tensor  # P + 1, by the number of kept pairs
    change: Tensor  # P + 1, groups, 2, P: by the number of kept pairs, stretching and turning for each query head

    def kept(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(self.order[len(self.order) - count :]))


def best_pairs(moment: Tensor, groups: int, count: int, order: Sequence[int] | None = None) -> PairSpace:
    """`moment` is F, over (query head of the group, stretching or turning, pair).

    With `order` the pairs are dropped in that order, whatever they cost.
    """
    size = groups * 2 * count
    index = torch.arange(size).view(groups, 2, count)
    stretch = moment.diagonal()[index[:, 0].flatten()].mean().clamp(min=1e-30) if size else moment.new_ones(())
    inverse = torch.linalg.inv(moment + DAMPING * stretch * torch.eye(size, dtype=moment.dtype))
    target = torch.zeros(size, dtype=moment.dtype)
    target[index[:, 0].flatten()] = -1.0
    x = torch.zeros(size, dtype=moment.dtype)
    left, dropped = list(range(count)), list[int]()
    loss, change = [moment.new_zeros(())], [x.view(groups, 2, count)]
    while left:
        blocks = [index[:, :, p].flatten() for p in left]
        if order is None:
            best = int(surgeon_costs(inverse, x, target, torch.stack(blocks)).argmin())
        else:
            best = left.index(order[len(dropped)])
        x, inverse = surgeon_step(inverse, x, target, blocks[best])
        dropped.append(left.pop(best))
        gone = index[:, :, dropped].flatten()
        x = x.index_copy(0, gone, target[gone])
        loss.append(0.5 * x @ moment @ x)
        change.append(x.view(groups, 2, count).clone())
    return PairSpace(tuple(dropped), torch.stack(loss[::-1]), torch.stack(change[::-1]))


def surgeon_costs(inverse: Tensor, x: Tensor, target: Tensor, blocks: Tensor) -> Tensor:
    """The increase of the loss if each of these blocks is fixed at its target and the others are optimised."""
    error = target[blocks] - x[blocks]
    weights = threads.inverse(inverse[blocks[:, :, None], blocks[:, None, :]])
    return (error * (weights @ error[..., None])[..., 0]).sum(1)


def surgeon_step(inverse: Tensor, x: Tensor, target: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """x with a block at its target and the others optimised, and the inverse with the block fixed."""
    into = torch.linalg.solve(inverse[block][:, block], inverse[block])
    x = x + into.T @ (target[block] - x[block])
    inverse = inverse - inverse[:, block] @ into
    fixed = torch.eye(len(block), dtype=inverse.dtype)
    inverse[block], inverse[:, block] = 0.0, 0.0
    inverse[block[:, None], block] = fixed  # never chosen, and never singular
    return x, inverse
