"""Elements without a gradient that no claim explains: which of them really change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deadweight.audit.evidence import Draw, gradients
from deadweight.audit.result import Unknown
from deadweight.claims.claim import Claim
from deadweight.claims.point import Point, Values
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.evaluate import largest_difference
from deadweight.graph.node import Graph
from deadweight.proof.operation_groups import POSITIVELY_HOMOGENEOUS

SMALLER = 0.1  # times the parameters, which are of order one: there a unit's input is within reach of zero
FAR = 3.0


def unexplained_zeros(
    claims: Iterable[Claim], graph: Graph, values: Values, draw: Draw, zero_elements: Values
) -> Iterator[Unknown]:
    """Zero gradients that no claim explains, except those of tables, where a row may not have been drawn.

    `zero_elements` marks the elements whose gradients are all zero.
    """
    candidates: Values = {}
    for name, zero in zero_elements.items():
        if any(r.op == "aten.embedding" for r in graph.users[name]):
            continue
        for claim in claims:
            if claim.node == name and isinstance(claim, ShiftClaim) and each_dead(claim):
                zero = zero & ~(claim.groups != 0).expand(zero.shape)
        if bool(zero.any()) and not unit_off(graph, zero):
            candidates[name] = zero
    for name, zero in unmoved_elements(graph, values, draw, candidates).items():
        why = f"unexplained: {int(zero.sum())} of {zero.numel()} elements have no gradient in a narrow clone"
        yield Unknown(graph.parameters[name], None, why)


def each_dead(claim: ShiftClaim) -> bool:
    """Whether the claim is about single elements: a claim about their mean does not explain a zero of one of them."""
    return claim.verdict == "dead" and claim.lost is None and element_wise(claim)


def unmoved_elements(graph: Graph, values: Values, draw: Draw, candidates: Values) -> Values:
    """The marked elements that can be moved far without a change: a zero gradient alone does not mean that.

    All are moved at once first. Only if that changes an output are elements with a gradient elsewhere left out, and
    each parameter with marked elements is moved by itself (never some of them: a unit that one of them turns off would
    hide the effect of the others). Then only what depends on it is computed again.
    """
    if not candidates:
        return {}
    point = Point(graph, values, draw(5))

    def stay(marked: Values) -> bool:
        generator = torch.Generator().manual_seed(7)
        moved = {}
        for name, zero in marked.items():  # by different amounts: moved alike, all might choose the same
            amounts = torch.randn(zero.shape, generator=generator, dtype=torch.float64)
            moved[name] = values[name] + FAR * amounts * zero
        return same_outputs(point, point.at(moved))

    if stay(candidates):
        return candidates
    left = without_gradient_elsewhere(graph, values, draw, candidates)
    assert not left or point.nodes  # computed once, for all that follow
    return {name: zero for name, zero in left.items() if stay({name: candidates[name]})}


def same_outputs(point: Point, moved: Point) -> bool:
    """Whether the outputs are the same. A trace on given values may not run on the path that moved parameters choose:
    then they decide something (how many tokens an expert gets), and the outputs are not the same."""
    before = point.outputs
    try:
        return largest_difference(before, moved.outputs) < 1e-12
    except (RuntimeError, IndexError, ValueError):
        if not point.graph.specialised:
            raise
        return False


def without_gradient_elsewhere(graph: Graph, values: Values, draw: Draw, candidates: Values) -> Values:
    """The marked elements whose gradient is zero with small parameters too, where GELU and sigmoid are not flat.

    Far from zero these functions are constant up to rounding, and what feeds such a unit has no gradient. A trace on
    given values is not run with other parameters: they may take another path.
    """
    if graph.specialised:
        return candidates
    small = {n: SMALLER * t if n in graph.parameters and t.is_floating_point() else t for n, t in values.items()}
    zero = gradients(graph, small, draw).zero_elements()
    both = {name: marked & zero[name] if name in zero else marked for name, marked in candidates.items()}
    return {name: marked for name, marked in both.items() if bool(marked.any())}


def unit_off(graph: Graph, zero: Tensor) -> bool:
    """Whether zeros may come from units that were off, or experts not chosen, for all inputs: some rows, not all."""
    gates = POSITIVELY_HOMOGENEOUS | {"aten.topk", "aten.hardtanh", "aten.clamp", "aten.relu6", "aten.hardswish"}
    return any(n.op in gates for n in graph.nodes.values()) and not bool(zero.all())
