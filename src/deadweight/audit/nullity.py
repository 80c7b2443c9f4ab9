"""Which directions change no output, beyond those that are explained.

Let the columns of B span the e explained directions. Choose e parameters so that these e rows of B are invertible, and
let A be the Jacobian without their columns. Every direction of the null space is the sum of one in B and one that does
not move these e parameters, so the nullity of A is the number of unexplained directions. A = LU with partial pivoting;
the square part of A that the pivots choose has the rank of A, and its smallest singular values are computed by inverse
iteration. That takes half the time of a QR and a tenth of that of an SVD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.audit.jacobian import JacobianRows, refuse_none

NULL = 1e-11  # singular values below this share of the largest count as zero: a norm's ε of 1e-6 leaves about 1e-9
LEFT = 3e-13  # a zero singular value above this share is larger than rounding explains
ROUNDING = 1e-13  # the largest share that rounding leaves of a zero
FRESH = 1e-10  # a direction with a larger effect than this on fresh rows is not redundant
MORE = 1.2  # rows per column: with as many rows as columns, some singular values are small by chance
SPARE = 8  # directions that are computed beyond those that look redundant: the first live one must be among them
ITERATIONS = 2  # each divides the live part by the square of the gap, at least 1e4


@dataclass(frozen=True)
class Unexplained:
    """Unit directions over all parameters that span the null space together with the explained ones."""

    directions: Float64[Tensor, "p n"]
    gap: float  # the smallest singular value counted as live over the largest counted as zero
    jacobian: Float64[Tensor, "m p"]  # the rows that they were computed from


def unexplained_directions(rows: JacobianRows, basis: Float64[Tensor, "p e"]) -> Unexplained:
    """The part of the null space that `basis` does not span; fresh rows then confirm or reject all its directions.

    If they reject one, the null space is computed again with these rows added: its directions were computed from rows
    on which the rejected one has no effect, and each of them may hold a share of it that rounding put there.
    """
    parameters, explained = basis.shape
    jacobian = rows.take(math.ceil(MORE * (parameters - explained)))
    refuse_none(jacobian)
    while True:
        scale = jacobian.norm(dim=0)
        scale = torch.where(scale > 1e-9 * scale.max(), scale, 1.0)  # (almost) no effect: nothing to scale by
        kept = free_columns(basis * scale.unsqueeze(1))
        null, gap = null_directions(unit_rows(jacobian[:, kept] / scale[kept]))
        if not null.shape[1]:
            break
        fresh = rows.take(max(null.shape[1] + SPARE, rows.drawn // 2))
        if not rejects(unit_rows(fresh[:, kept] / scale[kept]), null):
            break
        jacobian = torch.cat([jacobian, fresh])
    directions = torch.zeros(parameters, null.shape[1], dtype=torch.float64)
    directions[kept] = null / scale[kept].unsqueeze(1)
    return Unexplained(directions / directions.norm(dim=0), gap, jacobian)


def rejects(fresh: Float64[Tensor, "m n"], candidates: Float64[Tensor, "n k"]) -> bool:
    """Whether some combination of the candidates has an effect on fresh rows."""
    if not len(fresh):
        return False
    return float(torch.linalg.svdvals(fresh @ candidates)[0]) > FRESH * largest_singular(fresh)


def unit_rows(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)


def free_columns(basis: Float64[Tensor, "p e"]) -> Tensor:
    """The parameters that remain when one parameter is held fixed for every explained direction."""
    parameters, explained = basis.shape
    order = list(range(parameters))
    if explained:
        _, pivots, _ = torch.linalg.lu_factor_ex(torch.linalg.qr(basis)[0])
        for place, pivot in enumerate(pivots.tolist()):
            order[place], order[pivot - 1] = order[pivot - 1], order[place]
    return torch.tensor(sorted(order[explained:]), dtype=torch.int64)


def null_directions(rows: Float64[Tensor, "m n"]) -> tuple[Float64[Tensor, "n k"], float]:
    """An orthonormal basis of the null space, and the gap."""
    columns = rows.shape[1]
    if not columns:
        return torch.zeros(0, 0, dtype=torch.float64), math.inf
    if len(rows) < columns:
        rows = torch.cat([rows, torch.zeros(columns - len(rows), columns, dtype=torch.float64)])
    largest = largest_singular(rows)
    if not largest:
        return torch.eye(columns, dtype=torch.float64), math.inf
    factors = torch.linalg.lu_factor_ex(rows)[0][:columns]
    block = int((factors.diagonal().abs() < 1e4 * NULL * largest).sum()) + SPARE
    while True:
        vectors, singular = smallest_singular(factors, min(block, columns))
        null = singular < NULL * largest
        if not bool(null.all()) or block >= columns:
            break
        block *= 2
    redundant = vectors[:, null]
    zero = max([ROUNDING * largest, *(rows @ redundant).norm(dim=0).tolist()])
    live = float(singular[~null].min()) if not bool(null.all()) else math.inf
    return redundant, live / zero if zero <= LEFT * largest else 0.0


def largest_singular(matrix: Tensor) -> float:
    """By power iteration: an estimate is enough, since only orders of magnitude are compared."""
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(12):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp_min(1e-300)
    return float((matrix @ vector).norm())


def smallest_singular(factors: Float64[Tensor, "n n"], count: int) -> tuple[Float64[Tensor, "n k"], Tensor]:
    """The smallest singular values of LU and their right vectors, by inverse iteration."""
    floor = torch.finfo(torch.float64).eps * float(factors.diagonal().abs().max())
    tiny = factors.diagonal().abs() < floor
    factors.diagonal()[tiny] = floor  # smaller than the rounding errors there
    generator = torch.Generator().manual_seed(1)
    vectors = torch.linalg.qr(torch.randn(len(factors), count, generator=generator, dtype=torch.float64))[0]
    solves = ((factors.T, False, False), (factors.T, True, True), (factors, False, True), (factors, True, False))
    for matrix, upper, unit in solves * ITERATIONS:  # by Uᵀ, Lᵀ, L and U
        solved = torch.linalg.solve_triangular(matrix, vectors, upper=upper, unitriangular=unit)
        vectors = torch.linalg.qr(solved)[0]
    images = factors.triu() @ vectors
    images = factors.tril(-1) @ images + images
    _, singular, turn = torch.linalg.svd(images, full_matrices=False)
    return vectors @ turn.T, singular
