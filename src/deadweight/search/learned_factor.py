"""DW011 for factors: what a learned factor does, the parameters that wrote what it multiplies can do as well.

λ·v, where v is linear in some parameters P, whatever else it depends on: v(s·P) = s·v(P), so P times s and λ over s
give the same product. A scale that is learned for each attention head, on queries or on scores, folds into the head's
rows of the query projection; one that multiplies the result of a block folds into its last weight and bias. The factor
may be stored as a logarithm, λ = exp(p), or as λ = 1 + p; not as 1 + exp(p), of which p is no logarithm. Needs that
nothing but the product reads what is scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.scale_back import ScaleBack, can_be_scaled
from deadweight.proof.steps import Blocked
from deadweight.search.prover import Prover

VIEWS = ("aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.select")


@dataclass(frozen=True, kw_only=True)
class LearnedFactorClaim(Claim):
    """Number k of the factor is divided by s_k, and what has label k + 1 in `scaled` is multiplied by it."""

    factor: str  # the node of the factor's value
    logarithm: bool  # the parameter is its logarithm
    scaled: tuple[tuple[str, Tensor], ...]

    def motions(self, point: Point) -> Iterator[Motion]:
        for rates in torch.eye(self.dof, dtype=torch.float64):
            yield self.along(point, rates)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.along(point, normal(generator, self.dof))

    def along(self, point: Point, rates: Tensor) -> Motion:
        """Each number shrinks at its rate, and what it multiplies grows at that rate."""
        value = torch.ones(self.dof, dtype=torch.float64) if self.logarithm else point.value(self.factor).reshape(-1)
        motion = {name: point.values[name].to(torch.float64) * picked(rates, labels, 0) for name, labels in self.scaled}
        return {**motion, self.node: -(value * rates).reshape(point.values[self.node].shape)}

    def member(self, point: Point, generator: torch.Generator) -> Values:
        s = torch.rand(self.dof, generator=generator, dtype=torch.float64) + 0.5
        value = point.value(self.factor).reshape(-1)
        change = -s.log() if self.logarithm else value / s - value
        moved = {name: point.values[name] * picked(s, labels, 1) for name, labels in self.scaled}
        return {**moved, self.node: point.values[self.node] + change.reshape(point.values[self.node].shape)}


def picked(numbers: Tensor, labels: Tensor, otherwise: float) -> Tensor:
    """The number of each label, and another where there is none."""
    return torch.where(labels > 0, numbers[(labels - 1).clamp_min(0)], otherwise)


@dataclass(frozen=True)
class Factor:
    """The node of its value, the parameter behind it, and whether that is its logarithm."""

    node: str
    parameter: str
    logarithm: bool


def find_learned_factors(prover: Prover, law: Title) -> Iterator[LearnedFactorClaim]:
    graph = prover.graph
    possible = can_be_scaled(graph)
    claimed = {claim.node for claim in prover.claims}
    for node in graph.nodes.values():
        if node.op != "aten.mul" or node.name not in graph.live or node.kwargs:
            continue
        for value, factor in (node.args[:2], node.args[1::-1]):
            plain = isinstance(value, Ref) and isinstance(factor, Ref) and graph.depends[value.name] == (True, True)
            parameter = factor_parameter(graph, factor.name) if plain and possible[value.name] else None
            if parameter is not None and parameter[0] not in claimed:
                found = proved_back(graph, node, Factor(factor.name, *parameter), value.name, possible)
                if found is not None:
                    yield claim_of(law, *found)


def factor_parameter(graph: Graph, name: str) -> tuple[str, bool] | None:
    """The parameter behind a factor that is read here alone, and whether it is the factor's logarithm."""
    node, logarithm, offset = graph.nodes[name], False, False
    size = torch.Size(node.shape).numel()
    while node.op != "parameter":
        if len(graph.users[node.name]) != 1 or node.name in graph.outputs or not node.args:
            return None
        if node.op == "aten.exp" and not logarithm and not offset:  # of 1 + exp(p) the parameter is no logarithm
            logarithm = True
        elif node.op == "aten.add" and not node.kwargs and not isinstance(node.args[1], Ref):
            offset = True
        elif node.op not in VIEWS or len(node.inputs) != 1:
            return None
        if not isinstance(node.args[0], Ref):
            return None
        node = graph.node(node.args[0])
    alone = len(graph.users[node.name]) == 1 and node.name not in graph.outputs
    return (node.name, logarithm) if alone and node.is_float and torch.Size(node.shape).numel() == size else None


def proved_back(
    graph: Graph, product: Node, factor: Factor, value: str, possible: dict[str, bool]
) -> tuple[Factor, int, ScaleBack] | None:
    """The walk back from the product to all that must be scaled, if there is one that reaches every number's group."""
    shape = graph.nodes[factor.node].shape
    size = torch.Size(shape).numel()
    if product.shape != graph.nodes[value].shape:
        return None  # the factor repeats the value: several numbers for one element
    walk = ScaleBack(graph, possible, product, value, torch.arange(1, size + 1).reshape(shape).expand(product.shape))
    try:
        walk.run()
    except Blocked:
        return None
    reached = {k for labels in walk.scaled.values() for k in labels.unique().tolist()}
    whole = factor.parameter not in walk.scaled and reached >= set(range(1, size + 1))
    return (factor, size, walk) if whole else None


def claim_of(law: Title, factor: Factor, size: int, walk: ScaleBack) -> LearnedFactorClaim:
    return LearnedFactorClaim(
        law=law,
        node=factor.parameter,
        dof=size,
        verdict="folds",
        into=tuple(walk.scaled),
        steps=walk.steps(),
        note="a learned factor of what these parameters write",
        factor=factor.node,
        logarithm=factor.logarithm,
        scaled=tuple(walk.scaled.items()),
    )
