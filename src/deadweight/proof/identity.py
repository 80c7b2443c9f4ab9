"""Which elements of the traced values are equal by construction: identity labels, computed on demand."""

from __future__ import annotations

from typing import Any

import torch

from deadweight.graph.constants import known_indices
from deadweight.graph.node import Graph, Node, Ref, substitute
from deadweight.proof.labels import Labels, fresh, key, mix
from deadweight.proof.opsets import FREE, POINTWISE, SHAPE
from deadweight.proof.steps import refuse_large

ELEMENTWISE = POINTWISE | {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.where", "aten.masked_fill"}


class Identity:
    """Two elements with the same identity label hold the same number, for all inputs and parameters.

    A shape operation moves labels as it moves values; a pointwise operation gives equal results for equal operands;
    any other operation is taken to give different numbers everywhere.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[str, Any] = {}

    def of(self, ref: Ref | str) -> Labels:
        name = ref.name if isinstance(ref, Ref) else ref
        if name not in self.known:
            self.known[name] = self.compute(self.graph.nodes[name])
        return self.known[name]

    def compute(self, node: Node) -> Any:
        if node.op not in FREE:
            refuse_large(node)
        known = known_indices(self.graph, node)
        if known is not None and node.target is not None:
            return node.target(self.of(node.args[0]), known)
        if node.op == "getitem" and self.graph.node(node.args[0]).op not in SHAPE:
            return fresh(node.shape, node.name)
        if node.op in SHAPE and node.target is not None and self.data_free_indices(node):
            args = substitute(node.args, self.shape_argument)
            return node.target(*args, **substitute(node.kwargs, self.shape_argument))
        if node.op in ELEMENTWISE and node.args:
            return self.elementwise(node)
        return fresh(node.shape, node.name)

    def data_free_indices(self, node: Node) -> bool:
        """Index tensors move elements by their values, which a traced graph does not know."""
        return node.op not in ("aten.index", "aten.index_select", "aten.gather", "aten.masked_select")

    def shape_argument(self, name: str) -> Any:
        return self.of(name)

    def elementwise(self, node: Node) -> Labels:
        shapes = [self.graph.node(a).shape for a in node.args if isinstance(a, Ref)]
        if node.op == "aten.prelu" or torch.broadcast_shapes(node.shape, *shapes) != torch.Size(node.shape):
            return fresh(node.shape, node.name)  # operands meet along other axes than the last ones
        operands = [self.of(a).expand(node.shape) for a in node.args if isinstance(a, Ref)]
        constants = [a for a in node.args if not isinstance(a, Ref)]
        seed = torch.full((), key(node.op, *constants, *sorted(map(str, node.kwargs.items()))), dtype=torch.int64)
        positions = tuple(i for i, a in enumerate(node.args) if isinstance(a, Ref))
        return mix(seed.expand(node.shape), key(*positions), *operands)
