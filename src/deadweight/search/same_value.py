"""DW017 for factors: two parameters that multiply one value alike, and whose results are added, are one parameter.

a·v + b·v = (a + b)·v, whatever v is: any c can move from one to the other. Needs that each of the two parameters is
read there alone, and that both multiply the very same value with the same broadcast. Weights: DW020.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.claims.shift_claim import FAR
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.steps import Step
from deadweight.search.prover import Prover

VIEWS = ("aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.select", "aten.t", "aten.transpose")


@dataclass(frozen=True, kw_only=True)
class SameValueClaim(Claim):
    """`node` moves by c and `other` by `ratio` times c."""

    other: str
    ratio: float

    def motions(self, point: Point) -> Iterator[Motion]:
        shape = point.values[self.node].shape
        for c in torch.eye(self.dof, dtype=torch.float64):
            yield self.along(point, c.reshape(shape))

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.along(point, normal(generator, *point.values[self.node].shape))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """The motion is linear: a long way along it is as good as a short one."""
        return {n: point.values[n] + FAR * t for n, t in self.direction(point, generator).items()}

    def along(self, point: Point, c: Tensor) -> Motion:
        return {self.node: c, self.other: self.ratio * c.reshape(point.values[self.other].shape)}


@dataclass(frozen=True)
class Acting:
    """A parameter, the value it acts on, and the nodes from the parameter to the result."""

    parameter: str
    value: str
    op: str
    way: tuple[str, ...]  # the views on the way, with their arguments: two ways must be the same
    nodes: tuple[str, ...]


def find_same_values(prover: Prover, law: Title) -> Iterator[SameValueClaim]:
    graph = prover.graph
    claimed = {claim.node for claim in prover.claims}
    for node in graph.nodes.values():
        if node.op not in ("aten.add", "aten.sub") or node.name not in graph.live or len(node.inputs) != 2:
            continue
        left, right = ([*acting(graph, a)] for a in node.args[:2])
        for first, second in ((a, b) for a in left for b in right):
            if not alike(graph, first, second) or {first.parameter, second.parameter} & claimed:
                continue
            factor = float(node.kwargs.get("alpha", 1)) * (-1 if node.op == "aten.sub" else 1)
            if factor != 0:
                steps = steps_of(graph, node, first, second)
                yield claim_of(graph, law, (first, second), steps, -1 / factor)
                break


def acting(graph: Graph, ref: Ref) -> Iterator[Acting]:
    """How the result of a product is made of a parameter and a value, where nothing else reads it."""
    node = graph.node(ref)
    if node.op != "aten.mul" or node.kwargs or len(node.args) != 2 or not alone(graph, node):
        return
    for weight, value in (node.args, node.args[::-1]):
        if not isinstance(weight, Ref) or not isinstance(value, Ref):
            continue
        found, way, nodes = graph.node(weight), [], [node.name]
        while found.op in VIEWS and len(found.inputs) == 1 and alone(graph, found):
            way.append((found.op, *found.args[1:], found.shape))
            nodes.append(found.name)
            found = graph.node(found.args[0])
        if found.op == "parameter" and found.is_float and alone(graph, found):
            yield Acting(found.name, value.name, node.op, tuple(map(str, way)), (found.name, *reversed(nodes)))


def alone(graph: Graph, node: Node) -> bool:
    return len(graph.users[node.name]) == 1 and node.name not in graph.outputs


def alike(graph: Graph, first: Acting, second: Acting) -> bool:
    """Two parameters of one shape that act in one way on one value."""
    if first.parameter == second.parameter or first.value in (first.parameter, second.parameter):
        return False
    shapes = {graph.nodes[a.parameter].shape for a in (first, second)}
    return (first.value, first.op, first.way) == (second.value, second.op, second.way) and len(shapes) == 1


def steps_of(graph: Graph, total: Node, first: Acting, second: Acting) -> tuple[Step, ...]:
    moved = sorted({*first.nodes, *second.nodes}, key=graph.place.__getitem__)
    steps = [Step(n, graph.nodes[n].op, "c moves from one parameter to the other", "moved", True) for n in moved]
    return (*steps, Step(total.name, total.op, "both act on the same value", "c·v − c·v = 0"))


def claim_of(
    graph: Graph, law: Title, pair: tuple[Acting, Acting], steps: tuple[Step, ...], ratio: float
) -> SameValueClaim:
    first, second = pair
    return SameValueClaim(
        law=law,
        node=first.parameter,
        dof=torch.Size(graph.nodes[first.parameter].shape).numel(),
        verdict="folds",
        into=(second.parameter,),
        steps=steps,
        note=f"it acts on the same value as {graph.parameters[second.parameter]}, and their results are added",
        whole=True,
        other=second.parameter,
        ratio=ratio,
    )
