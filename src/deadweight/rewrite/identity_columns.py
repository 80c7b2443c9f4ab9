"""Choosing the columns in which every head of a matrix becomes the identity, so that rounding errors stay small."""

from __future__ import annotations

import torch
from torch import Tensor

from deadweight.rewrite.rewrite import NotDone
from deadweight.threads import inverse

SWAPS = 200
POOL = 512  # columns
COARSE = 1e6


def common_columns(rows: Tensor, allowed: Tensor) -> Tensor:
    """Columns in which every block (of heads × n × d, with orthonormal rows) is well conditioned.

    For a block with rows Q, the identity in columns J makes it R = Q_J⁻¹Q, and rounding errors grow with the size of R.
    Columns are chosen greedily: next is the one whose smallest share over all blocks is largest. Then single columns
    are swapped as long as the sum of |R|² over the blocks falls. Of a wide matrix only the columns with the largest
    shares are considered.
    """
    share = coarse(torch.where(allowed, rows.square().sum(1).amin(0), -1.0))
    pool = share.argsort(descending=True, stable=True)[: max(POOL, 4 * rows.shape[1])].sort().values
    few, can = rows[:, :, pool].contiguous(), allowed[pool]
    return pool[swap_columns(few, choose_greedily(few, can), can).sort().values]


def coarse(share: Tensor) -> Tensor:
    """Shares to six digits: of equally good columns the first is taken, whatever the rounding of sums."""
    return (share * COARSE).round()


def orthonormal(block: Tensor) -> Tensor:
    """An orthonormal basis of the row space: by the small Gram matrix where that is accurate enough, else by QR."""
    gram = block @ block.T
    factor, info = torch.linalg.cholesky_ex(gram)
    diagonal = torch.diagonal(factor)
    if int(info) == 0 and float(diagonal.min()) > 1e-5 * float(diagonal.max()):
        return torch.linalg.solve_triangular(factor, block, upper=False)
    return torch.linalg.qr(block.T, mode="reduced")[0].T


def choose_greedily(rows: Tensor, allowed: Tensor) -> Tensor:
    """One column after the other; what the chosen columns span in each block is projected out of the rest."""
    share = rows.square().sum(1)  # heads × d
    open_, taken = allowed.clone(), list[int]()
    spanned = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])  # heads × taken × n, orthonormal
    for i in range(rows.shape[1]):
        smallest = torch.where(open_, share.amin(0), -1.0)
        best = int(coarse(smallest).argmax())
        if float(smallest[best]) <= 1e-12:
            raise NotDone("no set of columns is invertible in every head")
        taken.append(best)
        open_[best] = False
        direction = rows[:, :, best]
        for _ in range(2):  # twice, for orthogonality to rounding
            direction = direction - (spanned.transpose(1, 2) @ (spanned @ direction[:, :, None]))[:, :, 0]
        direction = direction / direction.norm(dim=1, keepdim=True)
        spanned[:, i] = direction
        share = share - (direction[:, None, :] @ rows)[:, 0].square()
    return torch.tensor(taken)


def swap_columns(rows: Tensor, columns: Tensor, allowed: Tensor) -> Tensor:
    """Repeat the best single swap; rank-one updates give the cost of all swaps at once."""
    columns = columns.clone()
    for _ in range(SWAPS):
        back = inverse(rows[:, :, columns])
        size = back.square().sum((1, 2))
        turned = back @ rows  # R: heads × n × d
        gram = back @ back.transpose(1, 2)
        own = torch.diagonal(gram, dim1=1, dim2=2)[:, :, None]
        change = torch.einsum("hki,hkj->hij", gram, turned) - own
        distance = turned.square().sum(1)[:, None, :] - 2 * turned + 1
        cost = (size[:, None, None] - 2 * change / turned + distance * own / turned.square()).sum(0)
        cost[:, ~allowed] = torch.inf
        cost[:, columns] = torch.inf
        cost = torch.where(torch.isfinite(cost), cost, torch.inf)
        out, into = divmod(int(coarse(cost / size.sum()).argmin()), cost.shape[1])
        if not float(cost[out, into]) < float(size.sum()) * (1 - 1 / COARSE):
            break
        columns[out] = into
    return columns


def amplification(rows: Tensor, columns: Tensor) -> float:
    """The largest norm of R, in the worst block; orthonormal rows have norm 1."""
    return max(float(torch.linalg.svdvals(block[:, columns]).min().reciprocal()) for block in rows)
