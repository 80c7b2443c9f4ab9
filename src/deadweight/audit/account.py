"""The account: how many redundant dimensions there are, and how many of them the laws explain.

J is the Jacobian of the outputs with respect to all parameters, over more random outputs than parameters; its nullity
is the number of redundant dimensions. The motions of all claims must lie in that null space (soundness) and span it
(completeness). Nothing here shares code with the proofs: it differentiates the float64 model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.audit.evidence import ROUNDING, ordinary_size
from deadweight.audit.finding import Completeness
from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import evaluate, real_outputs
from deadweight.graph.node import Graph
from deadweight.laws.claim import Claim
from deadweight.laws.point import Motion, Point, Values

Draw = Callable[[int], Values]  # seed to fresh inputs

NULL = 1e-9  # singular values below this share of the largest are zero: rounding leaves about 1e-15, live ones 1e-6
LEFT = 1e-11  # and above this they are more than rounding leaves
UNSOUND = 1e-5  # distance of a unit motion from the null space: the space itself is known to about 1e-7
RANK = 1e-7  # singular values of unit motions, new directions against those already counted
GAP = 30.0  # between the smallest singular value that counts as live and the largest that counts as zero
LEAST_INPUTS = 16
EPSILON = 1e-10  # a claim up to a norm's ε counts where ε is at most this: then the model cannot tell either


@dataclass(frozen=True)
class Account:
    completeness: Completeness
    unsound: tuple[tuple[Claim, float], ...]  # claims whose motions change the outputs, and by how much
    gap: float  # smallest singular value counted as live over the largest counted as zero
    shortfall: tuple[tuple[str, float], ...] = ()  # parameter nodes that the unexplained directions move, and how much

    @property
    def decided(self) -> bool:
        """Whether a gap parts live dimensions from redundant ones, so that rounding has no say in the count."""
        return self.gap >= GAP


def account(graph: Graph, values: Values, draw: Draw, claims: Sequence[Claim], *, most_inputs: int = 3000) -> Account:
    """Measure the nullity, and the rank of what the claims explain of it."""
    order = sorted(n for n in graph.parameters if values[n].is_floating_point())
    null, singular = null_space(graph, values, draw, order, most_inputs)
    point = Point(graph, values, draw(0))
    unsound, spans = [], []
    for claim in claims:
        if claim.tier == "epsilon" and claim.epsilon > EPSILON:
            continue
        motions = flat_motions(claim, point, order)
        error = distance(motions, null)
        if not error <= UNSOUND:  # a motion that is no number holds nowhere
            unsound.append((claim, error))
        else:
            spans.append((claim.code, motions))
    by_law, basis = ranks_by_law(spans)
    explained = sum(n for _, n in by_law)
    result = Completeness(null.shape[1], explained, null.shape[0], by_law, len(unsound))
    gap = gap_of(singular, null.shape[0] - null.shape[1])
    return Account(result, tuple(unsound), gap, unexplained(null, basis, values, order))


def unexplained(null: Tensor, basis: Tensor | None, values: Values, order: list[str]) -> tuple[tuple[str, float], ...]:
    """Which parameters the directions outside the explained space move: the share of each in them."""
    rest = null if basis is None else null - basis @ (basis.T @ null)
    left, singular, _ = torch.linalg.svd(rest, full_matrices=False)
    rest = left[:, singular > 0.5]  # orthonormal both: singular values are 0 or 1 up to rounding
    sizes = [values[n].numel() for n in order]
    energy = [float(part.square().sum()) for part in rest.split(sizes)]
    found = sorted(((n, e) for n, e in zip(order, energy, strict=True) if e > 1e-3), key=lambda item: -item[1])
    return tuple(found)


def null_space(
    graph: Graph, values: Values, draw: Draw, order: list[str], most: int
) -> tuple[Float64[Tensor, "p n"], Tensor]:
    """An orthonormal basis of the directions that change no output, and the singular values of J.

    Inputs are drawn until there are well more outputs than parameters and half as many fresh ones confirm the space.
    """
    parameters = sum(values[name].numel() for name in order)
    rows, drawn = torch.zeros(0, parameters, dtype=torch.float64), 0
    batch: list[Tensor] = []
    live_before = -1
    while True:
        while drawn < most and (drawn < LEAST_INPUTS or rows.shape[0] + count(batch) < 1.2 * parameters):
            batch.append(jacobian_rows(graph, values, draw(drawn), order))
            drawn += 1
        rows, batch = compress(torch.cat([rows, *batch])), []
        if not len(rows):
            raise DeadweightError("no account can be made: the model's derivatives are not finite at random parameters")
        _, singular, right = torch.linalg.svd(rows)
        live = int((singular > NULL * singular[0]).sum())
        null = right[live:].T
        fresh = [jacobian_rows(graph, values, draw(drawn + i), order) for i in range(max(4, drawn // 2))]
        drawn += len(fresh)
        moved = float((torch.cat(fresh) @ null).abs().max()) if null.shape[1] and count(fresh) else 0.0
        faintest = float(singular[live - 1]) if live else 0.0
        settled = moved < max(NULL * float(singular[0]), 0.01 * faintest) or live == live_before
        if settled or drawn >= most:
            return null, singular
        live_before = live
        batch = fresh


def count(blocks: list[Tensor]) -> int:
    return sum(b.shape[0] for b in blocks)


def compress(rows: Tensor) -> Tensor:
    """The R of a QR: the same singular values and null space in at most as many rows as columns."""
    return torch.linalg.qr(rows, mode="r")[1] if rows.shape[0] > rows.shape[1] else rows


def distance(motions: Tensor, null: Tensor) -> float:
    """How far the farthest unit motion is from the null space."""
    if not motions.shape[1]:
        return 0.0
    return float((motions - null @ (null.T @ motions)).norm(dim=0).max())


def ranks_by_law(spans: list[tuple[str, Tensor]]) -> tuple[tuple[tuple[str, int], ...], Tensor | None]:
    """The rank that each law adds to those before it, and an orthonormal basis of all."""
    basis: Tensor | None = None
    found = []
    for code in sorted({code for code, _ in spans}):
        motions = torch.cat([m for c, m in spans if c == code], 1)
        for _ in range(2):  # twice, for orthogonality to rounding
            motions = motions if basis is None else motions - basis @ (basis.T @ motions)
        left, singular, _ = torch.linalg.svd(motions, full_matrices=False)
        new = left[:, singular > RANK]
        basis = new if basis is None else torch.cat([basis, new], 1)
        found.append((code, new.shape[1]))
    return tuple(found), basis


def gap_of(singular: Tensor, live: int) -> float:
    """The smallest singular value counted as live over the largest counted as zero; 0 if rounding leaves less."""
    if not 0 < live < len(singular):
        return float("inf")
    if float(singular[live]) > LEFT * float(singular[0]):
        return 0.0
    return float(singular[live - 1] / singular[live].clamp_min(1e-300))


def jacobian_rows(graph: Graph, values: Values, inputs: Values, order: list[str]) -> Float64[Tensor, "rows p"]:
    """One row per output element; continuous outputs and finite derivatives only."""
    leaves = {name: values[name].detach().clone().requires_grad_() for name in order}
    fixed = {name: value for name, value in values.items() if name not in leaves}
    outputs = evaluate(graph, {**fixed, **leaves}, inputs)
    real = [o.reshape(-1) for o in real_outputs(outputs) if o.requires_grad]
    if not real:
        return torch.zeros(1, sum(values[n].numel() for n in order), dtype=torch.float64)
    flat = torch.cat(real)
    eye = torch.eye(len(flat), dtype=torch.float64)
    read = [leaves[name] for name in order]
    grads = torch.autograd.grad(flat, read, eye, is_grads_batched=True, allow_unused=True)
    columns = [
        torch.zeros(len(flat), values[n].numel(), dtype=torch.float64) if g is None else g.reshape(len(flat), -1)
        for n, g in zip(order, grads, strict=True)
    ]
    found = torch.cat(columns, 1)
    silent = found.abs().amax(1) < ROUNDING * ordinary_size(flat.detach())
    return found.masked_fill(silent.unsqueeze(1), 0.0)[torch.isfinite(found).all(1)]


def flat_motions(claim: Claim, point: Point, order: list[str]) -> Tensor:
    """The claim's motions as unit columns over all parameters."""
    columns = [flatten(m, point.values, order) for m in claim.motions(point)]
    if not columns:
        return torch.zeros(sum(point.values[n].numel() for n in order), 0, dtype=torch.float64)
    stacked = torch.stack(columns, 1)
    return stacked / stacked.norm(dim=0).clamp_min(1e-300)


def flatten(motion: Motion, values: Mapping[str, Tensor], order: list[str]) -> Tensor:
    parts = [
        motion[n].reshape(-1) if n in motion else torch.zeros(values[n].numel(), dtype=torch.float64) for n in order
    ]
    return torch.cat(parts)
