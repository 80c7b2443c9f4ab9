"""A model at one point: parameters, inputs and every value in between, in float64. Claims are tried there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from deadweight.graph.evaluate import evaluate, float64_default, value_of
from deadweight.graph.node import Graph, Node

Values = dict[str, Tensor]
Motion = dict[str, Tensor]  # parameter node name to the direction in which it moves


@dataclass(frozen=True)
class Point:
    """`values` are the parameters and constants by node name."""

    graph: Graph
    values: Values
    inputs: Mapping[str, Tensor]

    @cached_property
    def nodes(self) -> dict[str, Any]:
        """The value of every node."""
        known: dict[str, Any] = {}

        def keep(node: Node, value: Any) -> Any:
            known[node.name] = value
            return value

        with torch.no_grad():
            evaluate(self.graph, self.values, self.inputs, keep)
        return known

    @cached_property
    def outputs(self) -> list[Tensor]:
        with torch.no_grad():
            return evaluate(self.graph, self.values, self.inputs)

    def at(self, values: Values) -> Point:
        """The same inputs at other parameters."""
        return Point(self.graph, {**self.values, **values}, self.inputs)

    def value(self, name: str, given: Mapping[str, Any] | None = None) -> Tensor:
        """One node's value, computed from what it depends on alone; values that are `given` are not computed."""
        known = dict(given or {})
        with torch.no_grad(), float64_default():
            for needed in ancestors(self.graph, name, known):
                known[needed] = value_of(self.graph, self.graph.nodes[needed], known, self.values, self.inputs)
        return known[name].to(torch.float64)

    def tangents(self, motion: Motion, nodes: Iterable[str], take: Callable[[Node, Tensor], bool]) -> None:
        """Follow a motion of parameters through these nodes in forward mode; `take` sees each tangent, and may end it.

        Views and sums of parameters are followed too. Whatever else the nodes read is not moved.
        """
        wanted = {*nodes, *(n for n, depends in self.graph.depends.items() if depends == (True, False))}
        with torch.no_grad(), forward_ad.dual_level(), float64_default():
            moved: dict[str, Any] = {
                name: forward_ad.make_dual(self.values[name].to(torch.float64), t) for name, t in motion.items()
            }
            for node in self.graph.nodes.values():
                if node.name in wanted and any(name in moved for name in node.inputs):
                    value = value_of(self.graph, node, Overlaid(moved, self.nodes), self.values, self.inputs)
                    tangent = forward_ad.unpack_dual(value).tangent if isinstance(value, Tensor) else None
                    if not isinstance(value, Tensor) or (tangent is not None and not take(node, tangent)):
                        moved[node.name] = value


class Overlaid(dict):
    """Moved values where there are any, else those that stay."""

    def __init__(self, moved: dict[str, Any], still: dict[str, Any]) -> None:
        super().__init__()
        self.moved, self.still = moved, still

    def __getitem__(self, name: str) -> Any:
        return self.moved[name] if name in self.moved else self.still[name]


def ancestors(graph: Graph, name: str, known: Mapping[str, Any]) -> list[str]:
    """The nodes that must be computed before a node can be, and the node itself, in the graph's order."""
    needed, stack = set[str](), [name]
    while stack:
        found = stack.pop()
        if found not in needed and found not in known:
            needed.add(found)
            stack.extend(graph.nodes[found].inputs)
    return [n for n in graph.nodes if n in needed]
