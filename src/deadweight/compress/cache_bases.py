"""The bases in which keys and values are coded.

Let x be what is cached, with mean μ and covariance C, and G the second moment of the gradient of the loss with respect
to x. With L = G^½ and the eigenvectors U of L C L, the coordinates Uᵀ L (x − μ) are uncorrelated, and an error in any
of them adds half of its square to the loss, to second order. They are then scaled to unit
variance; `cost` is the variance before that, twice the loss of leaving the coordinate out.

Keys and values of a layer are linear maps of the same hidden state, so codes of keys predict much of the values. In the
joint basis x is keys and values of a set of heads as one vector. Otherwise x is the keys first; values are predicted
from their codes, which costs no bytes, and what the prediction misses is coded in a basis of its own. With codes ẑ the
best linear prediction is Cov(v, ẑ) Cov(ẑ)⁻¹ ẑ. Rounding to the mean of each cell leaves E[ẑ | z] = (1 − D) z, D the
error of its width: Cov(v, ẑ) = Cov(v, z) K and Cov(ẑ) = K Cov(z) K + K (1 − K), K = diag(1 − D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.compress.cache_moments import SetMoments
from deadweight.compress.settings import Structure

RIDGE = 1e-3  # of the mean squared gradient, added to every direction: one without gradient in calibration still counts
TINY = 1e-12  # of the unit variance of coordinates: a coordinate without bits predicts nothing, and is divided by this
LEAST = 1e-8  # of the largest cost: coordinates that cost less are not scaled up to unit variance

BLOCK = 16  # dimensions of a block: of eight rotary pairs


@dataclass(frozen=True)
class Basis:
    """Coordinates of centred vectors, those of largest cost first: z = encode · x, x = decode · z."""

    encode: Tensor  # (m, m)
    decode: Tensor  # (m, m)
    cost: Tensor  # (m,)
    upper: Tensor | None = None  # (m,) which coordinates have codes in upper halves of units; None: any may


@dataclass(frozen=True)
class Roots:
    """L = G^½ of one block of a vector, and L⁻¹."""

    at: Tensor  # the members of the block
    to: Tensor
    back: Tensor


def roots_of(gradient: Tensor, blocks: Sequence[Sequence[int]]) -> tuple[Roots, ...]:
    """The roots of the second moment of the gradient, for every block."""
    ridge = RIDGE * gradient.diagonal().mean().clamp(min=1e-300)
    roots = []
    for block in blocks:
        at = torch.tensor(block, dtype=torch.long)
        weight = gradient[at[:, None], at] + ridge * torch.eye(len(at), dtype=gradient.dtype)
        values, vectors = torch.linalg.eigh(weight)
        root = values.clamp(min=1e-300).sqrt()
        roots.append(Roots(at, (vectors * root) @ vectors.T, (vectors / root) @ vectors.T))
    return tuple(roots)


def best_basis(covariance: Tensor, roots: Sequence[Roots]) -> Basis:
    """The basis of one set of heads; coordinates are mixed inside the blocks of the roots only."""
    size = len(covariance)
    encode, decode = torch.zeros_like(covariance), torch.zeros_like(covariance)
    cost = torch.zeros(size, dtype=covariance.dtype)
    for root in roots:
        inside = (root.at[:, None], root.at)
        encode[inside], decode[inside], cost[root.at] = decorrelate(covariance[inside], root)
    spread = cost.clamp(min=LEAST * float(cost.max().clamp(min=1e-300))).sqrt()
    order = cost.argsort(descending=True, stable=True)
    assert len(order) == size
    return Basis((encode / spread[:, None])[order], (decode * spread)[:, order], cost[order])


def decorrelate(covariance: Tensor, root: Roots) -> tuple[Tensor, Tensor, Tensor]:
    """The maps to and from coordinates that are uncorrelated and of equal cost per error, and their variances."""
    cost, turn = torch.linalg.eigh(root.to @ covariance @ root.to)
    return turn.T @ root.to, root.back @ turn, cost.clamp(min=0)


@dataclass(frozen=True)
class ValuesBasis:
    """The second stage: values ≈ `predict` · coordinates of keys; the residual has a basis of its own."""

    predict: Tensor  # (values, coordinates of keys)
    basis: Basis


def keys_basis(moments: SetMoments, blocks: Sequence[Sequence[int]], *, joint: bool) -> Basis:
    """The basis of the first stage: for the keys of a set, or for its keys and values as one vector."""
    at = slice(0, len(moments.mean) if joint else moments.keys)
    return best_basis(moments.covariance[at, at], roots_of(moments.gradient[at, at], blocks))


def value_roots(moments: SetMoments) -> tuple[Roots, ...]:
    """Those of the values of a set, for `values_basis`."""
    gradient = moments.gradient[moments.keys :, moments.keys :]
    return roots_of(gradient, [list(range(len(gradient)))])


def values_basis(moments: SetMoments, keys: Basis, errors: Tensor, roots: Sequence[Roots]) -> ValuesBasis:
    """The basis of the values of a set, if the coordinates of its keys are rounded with these errors, from 0 to 1."""
    covariance, n, kept = moments.covariance, moments.keys, 1 - errors
    cross = (covariance[n:, :n] @ keys.encode.T) * kept
    codes = kept[:, None] * (keys.encode @ covariance[:n, :n] @ keys.encode.T) * kept
    codes = codes + torch.diag(kept * errors + TINY)
    predict = torch.linalg.solve(codes, cross.T).T
    missed = covariance[n:, n:] - predict @ cross.T
    missed = (missed + missed.T) / 2
    return ValuesBasis(predict, best_basis(missed, roots))


def blocks_of(structure: Structure, size: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The blocks of the keys of one head; rotary pairs are the fastest first, and neighbours stay together."""
    turned = [place for pair in pairs for place in pair]
    order = turned + [i for i in range(size) if i not in set(turned)]
    if structure == "half":  # dimensions in no pair go with the slower ones
        faster = 2 * -(-len(pairs) // 2)
        return [block for block in (order[:faster], order[faster:]) if block]
    width = {"head": size, "block": min(BLOCK, size), "pair": 2, "scale": 1}[structure]
    return [order[i : i + width] for i in range(0, size, width)]


def in_second_block(basis: Basis, blocks: Sequence[Sequence[int]]) -> Basis:
    """The basis with coordinates of every second block in the upper halves of units; blocks come in pairs."""
    second = torch.zeros(len(basis.decode), dtype=torch.bool)
    for block in blocks[1::2]:
        second[list(block)] = True
    return replace(basis, upper=(basis.decode != 0)[second].any(0))
