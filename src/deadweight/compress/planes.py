"""Which planes of a rotary head to keep.

Rotary positions turn each plane of a head by its own angle, so a plane is kept or dropped whole; of the kept ones each
query head may stretch and turn its own (the commutant of the rotations), which makes up for part of what is lost. With
x the vector of all stretchings and turnings, the predicted loss is ½ xᵀFx, where F is the second moment of how the loss
answers to each. Dropping a plane fixes its stretchings at −1 and its turnings at 0; the others are free. Which plane to
drop next, and how the others make up for it, is the optimal brain surgeon's formula for a block of parameters
(Hassibi and Stork, 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight import threads

DAMPING = 1e-2  # of the mean variance of stretchings: large corrections are outside what second order can promise


@dataclass(frozen=True)
class Planes:
    """`order[n:]` are the planes that remain when n are dropped; `loss[k]` is predicted for k kept planes."""

    order: tuple[int, ...]
    loss: Tensor  # P + 1, by the number of kept planes
    change: Tensor  # P + 1, groups, 2, P: by the number of kept planes, stretching and turning for each query head

    def kept(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(self.order[len(self.order) - count :]))


def best_planes(
    moment: Tensor, groups: int, count: int, *, free: bool = True, order: Sequence[int] | None = None
) -> Planes:
    """`moment` is F, over (query head of the group, stretching or turning, plane). Not `free`: nothing makes up.

    With `order` the planes are dropped in that order, whatever they cost.
    """
    size = groups * 2 * count
    index = torch.arange(size).view(groups, 2, count)
    stretch = moment.diagonal()[index[:, 0].flatten()].mean().clamp(min=1e-30) if size else moment.new_ones(())
    damped = moment + DAMPING * stretch * torch.eye(size, dtype=moment.dtype)
    target = torch.zeros(size, dtype=moment.dtype)
    target[index[:, 0].flatten()] = -1.0
    x = torch.zeros(size, dtype=moment.dtype)
    inverse = torch.linalg.inv(damped) if free else None
    left, dropped = list(range(count)), list[int]()
    loss, change = [moment.new_zeros(())], [x.view(groups, 2, count)]
    while left:
        blocks = [index[:, :, p].flatten() for p in left]
        if order is not None:
            best = left.index(order[len(dropped)])
        elif inverse is not None:
            best = int(surgeon_costs(inverse, x, target, torch.stack(blocks)).argmin())
        else:
            costs = [fixed_cost(damped, x, target, b) for b in blocks]
            best = min(range(len(left)), key=costs.__getitem__)
        block = blocks[best]
        if inverse is not None:
            x, inverse = surgeon_step(inverse, x, target, block)
        else:
            x = x.index_copy(0, block, target[block])
        dropped.append(left.pop(best))
        gone = index[:, :, dropped].flatten()
        x = x.index_copy(0, gone, target[gone])
        loss.append(0.5 * x @ moment @ x)
        change.append(x.view(groups, 2, count).clone())
    return Planes(tuple(dropped), torch.stack(loss[::-1]), torch.stack(change[::-1]))


def surgeon_costs(inverse: Tensor, x: Tensor, target: Tensor, blocks: Tensor) -> Tensor:
    """What fixing each of these blocks at its target would cost, with the rest at its best."""
    error = target[blocks] - x[blocks]
    weights = threads.inverse(inverse[blocks[:, :, None], blocks[:, None, :]])
    return (error * (weights @ error[..., None])[..., 0]).sum(1)


def surgeon_step(inverse: Tensor, x: Tensor, target: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """x with a block at its target and the rest at its best, and the inverse with the block fixed."""
    into = torch.linalg.solve(inverse[block][:, block], inverse[block])
    x = x + into.T @ (target[block] - x[block])
    inverse = inverse - inverse[:, block] @ into
    fixed = torch.eye(len(block), dtype=inverse.dtype)
    inverse[block], inverse[:, block] = 0.0, 0.0
    inverse[block[:, None], block] = fixed  # out of the way, and never singular
    return x, inverse


def fixed_cost(moment: Tensor, x: Tensor, target: Tensor, block: Tensor) -> float:
    moved = x.index_copy(0, block, target[block])
    return float(moved @ moment @ moved)
