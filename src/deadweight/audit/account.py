"""The account: how many redundant dimensions there are, and how many of them the laws explain.

J is the Jacobian of the outputs with respect to all parameters, with more random outputs than parameters; its nullity
is the number of redundant dimensions. The motions of all claims must lie in this null space (soundness) and span it
(completeness). Nothing here shares code with the proofs: the float64 model is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.audit.choice_parameters import has_no_derivative
from deadweight.audit.jacobian import Draw, JacobianRows, refuse_none
from deadweight.audit.nullity import largest_singular, unexplained_directions
from deadweight.audit.result import Completeness
from deadweight.audit.unread import unread_rows
from deadweight.claims.claim import Claim
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.node import Graph

COUNTABLE = 20_000  # parameters: an account of a larger clone takes too much memory and time
SOUND = 1e-11  # largest effect of a unit motion that changes nothing, as a share of the largest effect of any motion
FAINT = 1e-9  # the same for claims that hold up to a norm's ε
RANK = 1e-7  # singular values above this are new directions, below it they are combinations of those counted
GAP = 30.0  # least ratio of the smallest singular value counted as live to the largest counted as zero
PROBES = 64  # rows on which every motion is tried: a random sum of the outputs changes if any output does
EPSILON = 1e-10  # claims that hold up to a norm's ε are counted where ε is at most this: float64 shows no difference


@dataclass(frozen=True)
class Account:
    completeness: Completeness
    unsound: tuple[tuple[Claim, float], ...]  # claims whose motions change the outputs, and by how much
    gap: float  # smallest singular value counted as live over the largest counted as zero
    shortfall: tuple[tuple[str, float], ...] = ()  # parameter nodes that the unexplained directions move, and how much
    unread: int = 0  # of the unexplained dimensions, those in rows of tables that no drawn input reads

    @property
    def decided(self) -> bool:
        """Whether live and redundant dimensions are clearly apart, so that rounding cannot change the count."""
        return self.gap >= GAP


def make_account(
    graph: Graph, values: Values, draw: Draw, claims: Sequence[Claim], *, most_inputs: int = 3000
) -> Account:
    """Measure the nullity, and how much of it the claims explain."""
    floats = [n for n in graph.parameters if values[n].is_floating_point()]
    order = sorted(n for n in floats if n not in graph.live or not has_no_derivative(graph, n))
    if not any(values[n].numel() for n in order):  # nothing that could be redundant
        return Account(Completeness(0, 0), (), math.inf)
    rows = JacobianRows(graph, values, draw, order, most_inputs)
    point = Point(graph, values, draw(0))
    unsound, spans = check_motions(claims, point, rows)
    by_law, basis = ranks_by_law(spans, sum(rows.sizes))
    unexplained = unexplained_directions(rows, basis)
    parameters, explained = basis.shape
    result = Completeness(explained + unexplained.directions.shape[1], explained, parameters, by_law, len(unsound))
    moved = moved_parameters(unexplained.directions, basis, rows)
    unread = unread_rows(rows, unexplained.jacobian, claims)
    return Account(result, tuple(unsound), unexplained.gap, moved, within(unread, basis))


def within(unread: Tensor, basis: Tensor) -> int:
    """How many dimensions of these parameters, none of which has an effect, are not in the span of the basis."""
    size, explained = int(unread.sum()), basis.shape[1]
    if not size or not explained:
        return size
    elsewhere = int((torch.linalg.svdvals(basis[~unread]) > RANK).sum())  # what is explained of all other parameters
    return size - (explained - elsewhere)


def check_motions(
    claims: Sequence[Claim], point: Point, rows: JacobianRows
) -> tuple[list[tuple[Claim, float]], list[tuple[str, Tensor]]]:
    """The claims whose motions change the outputs, and by how much; the motions of all others, by law."""
    probes = rows.take(PROBES)
    refuse_none(probes)
    largest = max(largest_singular(probes), 1e-300)
    unsound, spans = [], []
    for claim in claims:
        if claim.tier == "epsilon" and claim.epsilon > EPSILON:
            continue
        motions = flat_motions(claim, point, rows)
        error = float((probes @ motions).norm(dim=0).max()) / largest if motions.shape[1] else 0.0
        if not error <= (FAINT if claim.tier == "epsilon" else SOUND):  # NaN is not sound
            unsound.append((claim, error))
        else:
            spans.append((claim.code, motions))
    return unsound, spans


def moved_parameters(directions: Tensor, basis: Tensor, rows: JacobianRows) -> tuple[tuple[str, float], ...]:
    """The parameters that the unexplained directions move, with their shares, after removing what is explained."""
    for _ in range(2):  # twice, for orthogonality to rounding
        left, singular, _ = torch.linalg.svd(directions - basis @ (basis.T @ directions), full_matrices=False)
        directions = left[:, singular > RANK]
    energy = [float(part.square().sum()) for part in directions.split(rows.sizes)]
    shares = ((n, e) for n, e in zip(rows.order, energy, strict=True) if e > 1e-3)
    return tuple(sorted(shares, key=lambda item: -item[1]))


def ranks_by_law(spans: list[tuple[str, Tensor]], parameters: int) -> tuple[tuple[tuple[str, int], ...], Tensor]:
    """The rank that each law adds to those before it, and an orthonormal basis of all."""
    basis = torch.zeros(parameters, 0, dtype=torch.float64)
    ranks = []
    for code in sorted({code for code, _ in spans}):
        motions = torch.cat([m for c, m in spans if c == code], 1)
        for _ in range(2):  # twice, for orthogonality to rounding
            motions = motions - basis @ (basis.T @ motions)
        left, singular, _ = torch.linalg.svd(motions, full_matrices=False)
        new = left[:, singular > RANK]
        basis = torch.cat([basis, new], 1)
        ranks.append((code, new.shape[1]))
    return tuple(ranks), basis


def flat_motions(claim: Claim, point: Point, rows: JacobianRows) -> Tensor:
    """The claim's motions as unit columns over all parameters."""
    columns = [flatten(m, point.values, rows.order) for m in claim.motions(point)]
    if not columns:
        return torch.zeros(sum(rows.sizes), 0, dtype=torch.float64)
    stacked = torch.stack(columns, 1)
    return stacked / stacked.norm(dim=0).clamp_min(1e-300)


def flatten(motion: Motion, values: Mapping[str, Tensor], order: list[str]) -> Tensor:
    parts = [
        motion[n].reshape(-1) if n in motion else torch.zeros(values[n].numel(), dtype=torch.float64) for n in order
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
