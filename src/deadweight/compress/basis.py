"""The basis in which keys and values are coded.

Let x be what is cached, with mean μ and covariance C, and G the second moment of the gradient of the loss with respect
to x. With L = G^½ and the eigenvectors U of L C L, the coordinates Uᵀ L (x − μ) are uncorrelated, and an error of the
same size in any of them costs the loss the same: ½ of its square, to second order. They are then scaled to unit
variance; `cost` is the variance before that, twice the loss of leaving the coordinate out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean squared gradient, added to every direction: what calibration never asked for still counts
LEAST = 1e-8  # of the largest cost: coordinates that cost less are not scaled up to unit variance

Structure = Literal["all", "head", "block", "pair", "scale"]
STRUCTURES: tuple[Structure, ...] = ("all", "head", "block", "pair", "scale")
BLOCK = 16  # dimensions of a block: of eight rotary pairs


@dataclass(frozen=True)
class Basis:
    """Coordinates of one set of heads, those that cost most first: z = encode · (x − mean), x = decode · z + mean."""

    encode: Tensor  # (m, m)
    decode: Tensor  # (m, m)
    mean: Tensor  # (m,)
    cost: Tensor  # (m,)


def best_basis(mean: Tensor, covariance: Tensor, gradient: Tensor, blocks: Sequence[Sequence[int]]) -> Basis:
    """The basis of one set of heads; coordinates are mixed inside the blocks only."""
    size = len(mean)
    ridge = RIDGE * gradient.diagonal().mean().clamp(min=1e-300)
    encode, decode, cost = torch.zeros_like(covariance), torch.zeros_like(covariance), torch.zeros_like(mean)
    for block in blocks:
        at = torch.tensor(block, dtype=torch.long)
        inside = (at[:, None], at)
        weight = gradient[inside] + ridge * torch.eye(len(at), dtype=mean.dtype)
        encode[inside], decode[inside], cost[at] = decorrelate(covariance[inside], weight)
    spread = cost.clamp(min=LEAST * float(cost.max().clamp(min=1e-300))).sqrt()
    order = cost.argsort(descending=True, stable=True)
    assert len(order) == size
    return Basis((encode / spread[:, None])[order], (decode * spread)[:, order], mean, cost[order])


def decorrelate(covariance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maps to and from coordinates that are uncorrelated and cost alike, and their variances."""
    values, vectors = torch.linalg.eigh(weight)
    root = values.clamp(min=1e-300).sqrt()
    to, back = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    cost, turn = torch.linalg.eigh(to @ covariance @ to)
    return turn.T @ to, back @ turn, cost.clamp(min=0)


def blocks_of(structure: Structure, heads: int, size: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The blocks of a set of so many heads of this size; neighbouring rotary pairs stay together."""
    if structure == "all":
        return [list(range(heads * size))]
    turned = [place for pair in pairs for place in pair]
    order = turned + [i for i in range(size) if i not in set(turned)]
    width = {"head": size, "block": min(BLOCK, size), "pair": 2, "scale": 1}[structure]
    inside = [order[i : i + width] for i in range(0, size, width)]
    return [[head * size + place for place in block] for head in range(heads) for block in inside]
