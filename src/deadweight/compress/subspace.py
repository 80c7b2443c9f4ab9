"""The best r dimensions of a space that several heads share.

Heads h output vectors z_h; the gradients with respect to them are ∂z_h. The r numbers B z_h are kept, and the next
layer reads A_h B z_h in place of z_h. The predicted loss is ½ Σ_h tr(G_h E_h Z_h E_hᵀ) with E_h = I − A_h B and the
second moments Z_h of z_h and G_h of ∂z_h, taken as independent.

For given B the best A_h is the regression Z_h Bᵀ (B Z_h Bᵀ)⁻¹, whatever the gradients are. For one head the best B are
the leading left singular vectors of G^½ Z^½, times G^½ (Eckart and Young); for several, those of the sums are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.threads import eigen, inverse

JITTER = 1e-6  # of a moment's mean variance: sums in float32 are no better


@dataclass(frozen=True)
class Subspace:
    """Nested: the first r rows of `basis` are the best r dimensions, and `loss[r]` is predicted for them."""

    basis: Tensor  # d d
    loss: Tensor  # d + 1
    moment: Tensor  # h d d

    def back(self, rank: int) -> Tensor:
        """A_h, (h, d, r): the regression of the original vectors on the kept numbers."""
        if rank == len(self.basis):  # nothing is lost: no regression could do better than the inverse
            return inverse(self.basis).expand_as(self.moment)
        kept, moment = self.basis[:rank], self.moment
        inner = kept @ moment @ kept.T
        right = torch.cholesky_solve(kept @ moment, torch.linalg.cholesky(add_jitter(inner)))
        return right.transpose(1, 2)


def orthogonal(space: Subspace) -> Subspace:
    """The same nested subspaces with orthonormal rows, so that kept numbers are about as large as the original ones."""
    rows = torch.linalg.qr(space.basis.T)[0].T
    return Subspace(rows, space.loss, space.moment)


def positive(moment: Tensor) -> Tensor:
    """The nearest matrix without negative eigenvalues, which rounding can produce."""
    values, vectors = eigen(0.5 * (moment + moment.transpose(-1, -2)))
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.transpose(-1, -2)


def root(moment: Tensor) -> Tensor:
    values, vectors = eigen(moment)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.transpose(-1, -2)


def add_jitter(moment: Tensor) -> Tensor:
    """A moment that can be inverted: a little variance in every direction, absolute where there is none at all."""
    size = moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1) if size else moment.new_zeros(moment.shape[:-2])
    return moment + (JITTER * mean.clamp(min=1e-30))[..., None, None] * torch.eye(size, dtype=moment.dtype)


def best_subspace(moment: Tensor, gradient: Tensor) -> Subspace:
    """`moment` and `gradient` are (h, d, d): second moments of z and of ∂z for all heads that share the space."""
    z, g = positive(moment), positive(gradient)
    whole, weight = add_jitter(z.sum(0)), root(add_jitter(g.sum(0)))
    left, _, _ = torch.linalg.svd(weight @ root(whole))
    basis = left.T @ weight
    basis = basis / (basis @ whole @ basis.T).diagonal().clamp(min=1e-300).sqrt()[:, None]
    inner = torch.linalg.cholesky(add_jitter(basis @ z @ basis.T))
    explained = torch.linalg.solve_triangular(inner, basis @ z, upper=False)  # h d d: one new direction per row
    gain = ((explained @ g) * explained).sum(-1).sum(0)
    total = (g * z).sum()
    loss = 0.5 * (total - torch.cat([gain.new_zeros(1), gain.cumsum(0)])).clamp(min=0)
    return Subspace(basis, loss, z)
