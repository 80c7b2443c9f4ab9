"""A model at one point: parameters, inputs and every value in between, in float64. Claims are tried there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deadweight.claims.tangent import derivative
from deadweight.graph.evaluate import Near, evaluate, float64_default, value_of
from deadweight.graph.node import Graph, Node, Value

Values = dict[str, Tensor]
Motion = dict[str, Tensor]  # parameter node name to the direction in which it moves


@dataclass(frozen=True)
class Point:
    """`values` are the parameters and constants by node name; `moved` names those that differ from the `origin`'s."""

    graph: Graph
    values: Values
    inputs: Mapping[str, Tensor]
    origin: Point | None = None  # same graph and inputs: what no moved parameter reaches has the same value there
    moved: frozenset[str] = frozenset()

    @cached_property
    def nodes(self) -> dict[str, Value]:
        """The value of every node."""
        known: dict[str, Value] = {}

        def keep(node: Node, value: Value) -> Value:
            known[node.name] = value
            return value

        with torch.no_grad():
            evaluate(self.graph, self.values, self.inputs, keep, self.near)
        return known

    @cached_property
    def outputs(self) -> list[Tensor]:
        known = self.__dict__.get("nodes")
        if known is not None:  # computed before
            return [known[name] for name in self.graph.outputs]
        with torch.no_grad():
            return evaluate(self.graph, self.values, self.inputs, near=self.near)

    @property
    def near(self) -> Near | None:
        """The origin's values, if they have been computed."""
        known = None if self.origin is None else self.origin.__dict__.get("nodes")
        return None if known is None else Near(known, self.moved)

    def at(self, values: Values) -> Point:
        """The same inputs at other parameters."""
        moved = self.moved | values.keys()
        return Point(self.graph, {**self.values, **values}, self.inputs, self.origin or self, moved)

    def value(self, name: str, given: Mapping[str, Value] | None = None) -> Tensor:
        """One node's value, computed from what it depends on alone; values that are `given` are not computed."""
        return self.computed(name, given).to(torch.float64)

    def computed(self, name: str, given: Mapping[str, Value] | None = None) -> Value:
        """The same, of whatever type it is."""
        known = dict(given or {})
        with torch.no_grad(), float64_default():
            for needed in ancestors(self.graph, name, known):
                known[needed] = value_of(self.graph, self.graph.nodes[needed], known, self.values, self.inputs)
        return known[name]

    def tangents(self, motion: Motion, nodes: Iterable[str], take: Callable[[Node, Tensor], bool]) -> None:
        """Follow a motion of parameters through these nodes in forward mode; `take` sees each tangent, and may end it.

        Views and sums of parameters are followed too. Whatever else the nodes read is not moved.
        """
        wanted = {*nodes, *(n for n, depends in self.graph.depends.items() if depends == (True, False))}
        moved: dict[str, Value] = {name: t.to(torch.float64) for name, t in motion.items()}
        still = Known(self)
        with torch.no_grad(), float64_default():
            for node in self.graph.nodes.values():
                if node.name in wanted and any(name in moved for name in node.inputs):
                    tangent = derivative(self.graph, node, moved, still)
                    if tangent is not None and not (isinstance(tangent, Tensor) and take(node, tangent)):
                        moved[node.name] = tangent


class Known(dict):
    """The values of nodes, computed when they are asked for: weights by themselves, all else in one run."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        self.point = point

    def __missing__(self, name: str) -> Value:
        point = self.point
        alone = "nodes" not in point.__dict__ and not point.graph.depends[name][1]
        self[name] = point.computed(name) if alone else point.nodes[name]
        return self[name]


def ancestors(graph: Graph, name: str, known: Mapping[str, Value]) -> list[str]:
    """The nodes that must be computed before a node can be, and the node itself, in the graph's order."""
    needed, stack = set[str](), [name]
    while stack:
        current = stack.pop()
        if current not in needed and current not in known:
            needed.add(current)
            stack.extend(graph.nodes[current].inputs)
    return [n for n in graph.nodes if n in needed]
