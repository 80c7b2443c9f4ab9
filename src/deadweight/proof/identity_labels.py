"""Which elements of the traced values are equal by construction: identity labels, computed on demand."""

from __future__ import annotations

import math

import torch

from deadweight.graph.constants import known_indices
from deadweight.graph.node import Graph, Node, Ref, Value
from deadweight.proof.labels import Labels, compact, fold, fresh, key, mix
from deadweight.proof.operation_groups import FREE, INDEXED, KEEPS_REPEATED, POINTWISE, SHAPE
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked, refuse_large

ELEMENTWISE = POINTWISE | {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.where", "aten.masked_fill"}


LARGE = 1 << 20  # elements of a value: below this, labels of all of them take no time


class Identity:
    """Two elements with the same identity label hold the same number, for all inputs and parameters.

    A shape operation moves labels as it moves values; a pointwise operation gives equal results for equal operands;
    any other operation is taken to give different numbers everywhere.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[str, Value] = {}

    def of(self, ref: Ref | str) -> Labels:
        name = ref.name if isinstance(ref, Ref) else ref
        if name not in self.known:
            self.known[name] = self.compute(self.graph.nodes[name])
        return self.known[name]

    def lines(self, name: str, axis: int) -> Labels:
        """One label for every line of a value along an axis, of length one there: two with one label are equal.

        Of a large value whose elements are all different, as the scores of all queries and keys, only the lines are
        labelled: memory and time then grow with the number of lines.
        """
        node = self.graph.nodes[name]
        if math.prod(node.shape) <= LARGE or not self.is_new(node):
            return fold(self.of(name), axis).unsqueeze(axis)
        shape = [1 if a == axis % len(node.shape) else n for a, n in enumerate(node.shape)]
        return fresh(tuple(shape), name, "line", axis % len(node.shape))

    def is_new(self, node: Node) -> bool:
        """Whether every element of a value gets a label of its own."""
        return node.op != "buffer" and node.op not in SHAPE and node.op not in ELEMENTWISE

    def compute(self, node: Node) -> Value:
        if node.op not in FREE | KEEPS_REPEATED or node.op not in ELEMENTWISE | SHAPE:
            refuse_large(node)
        if node.op == "buffer":
            return repeated_slices(node, self.graph)
        known = known_indices(self.graph, node)
        if known is not None and node.target is not None:
            return node.target(self.of(node.args[0]), known)
        if node.op == "getitem":
            return self.part(node)
        if node.op in SHAPE - INDEXED and node.target is not None:
            return self.moved(node)
        if node.op in ELEMENTWISE and node.args:
            return self.elementwise(node)
        return fresh(node.shape, node.name)

    def moved(self, node: Node) -> Value:
        """Elements that data sends somewhere are taken to be new ones."""
        operands = {name: self.of(name) for name in node.inputs}
        try:
            return move(self.graph, node, operands.__getitem__)
        except Blocked:
            refuse_large(node)
            return fresh(node.shape, node.name)

    def part(self, node: Node) -> Labels:
        """One of several results."""
        parts = self.of(node.args[0]) if self.graph.node(node.args[0]).op in SHAPE else None
        return parts[node.args[1]] if isinstance(parts, (list, tuple)) else fresh(node.shape, node.name)

    def elementwise(self, node: Node) -> Labels:
        shapes = [self.graph.node(a).shape for a in node.args if isinstance(a, Ref)]
        if node.op == "aten.prelu" or torch.broadcast_shapes(node.shape, *shapes) != torch.Size(node.shape):
            return fresh(node.shape, node.name)  # operands meet along other axes than the last ones
        operands = [self.of(a).expand(node.shape) for a in node.args if isinstance(a, Ref)]
        refuse_large(node, *(compact(operand).shape for operand in operands))
        constants = [a for a in node.args if not isinstance(a, Ref)]
        seed = torch.full((), key(node.op, *constants, *sorted(map(str, node.kwargs.items()))), dtype=torch.int64)
        positions = tuple(i for i, a in enumerate(node.args) if isinstance(a, Ref))
        return mix(seed.expand(node.shape), key(*positions), *operands)


def repeated_slices(node: Node, graph: Graph) -> Labels:
    """Slices of a constant that hold the same numbers, all of them, are one slice: rotary tables repeat their halves.

    Single equal numbers say nothing: the first row of a rotary table is all ones, the next ones are not. What is
    stored with the model may be trained or counted, and what is one number everywhere is a state not yet written.
    """
    labels, value = fresh(node.shape, node.name), graph.tensors.get(node.name)
    if node.name in graph.buffers or value is None or value.is_meta or not value.is_floating_point():
        return labels
    if value.ndim < 2 or not value.numel() or bool((value == value.reshape(-1)[0]).all()):
        return labels
    for axis in range(value.ndim):
        first: dict[bytes, int] = {}
        slices = value.detach().movedim(axis, 0).clone(memory_format=torch.contiguous_format)  # strides of 1 as well
        slices = slices.view(torch.uint8).flatten(1)
        same = [first.setdefault(part.numpy().tobytes(), place) for place, part in enumerate(slices)]
        labels = labels.index_select(axis, torch.tensor(same))
    return labels
