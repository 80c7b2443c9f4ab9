"""Which elements of a value reach an output: a slice, an unused part of a split and a fixed choice leave others out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deadweight.graph.constants import constant_value, known_indices
from deadweight.graph.node import Graph, Node, Value, substitute
from deadweight.proof.operation_groups import INDEXED, POINTWISE, SHAPE, names

LARGEST = 1 << 24  # elements: a larger value counts as read whole, unless no operation leaves any out
ELEMENT_WISE = POINTWISE - {"aten.prelu"} | names("add sub mul div neg where masked_fill dropout")
KEEP_ALL = names("""
T alias_copy broadcast_to cat expand flatten flip mT movedim numpy_T permute repeat reshape roll squeeze stack swapaxes
t tile transpose unflatten unsqueeze
""")
BOUNDED = names("slice narrow index index_select")  # with bounds that may be those of an input
VIEWS = names("slice select narrow split split_with_sizes chunk unbind transpose permute t unsqueeze squeeze")


def elements_read(graph: Graph) -> dict[str, Tensor]:
    """Of the values of which only a part is read: which elements. All others are read whole, or not at all."""
    reading = Reading(graph)
    for node in reversed(list(graph.nodes.values())):
        reading.visit(node)
    return reading.masks


class Reading:
    """One pass from the outputs back to the parameters; what no rule below knows is read whole."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.whole: set[str] = set(graph.outputs)
        self.masks: dict[str, Tensor] = {}
        self.parts: dict[str, dict[int, Tensor | None]] = {}  # of values that are lists
        sizes = {n for node in graph.nodes.values() if node.op == "input" for n in sizes_of(node)}
        self.lengths = {m for n in sizes for m in (n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1, n * n)}

    def visit(self, node: Node) -> None:
        """What this node reads, given what is read of it."""
        if node.op != "output" and not (node.name in self.whole or node.name in self.masks or node.name in self.parts):
            return
        mask = self.masks.get(node.name)
        if node.op == "getitem":
            self.read_part(node.args[0].name, node.args[1], mask)
        elif 0 in node.shape:
            self.read_whole(node)  # empty for this input, perhaps not for others
        elif node.op in ELEMENT_WISE and mask is not None:
            for name in node.inputs:
                self.read(name, unbroadcast(mask, self.graph.nodes[name].shape))
        elif node.op == "linear" and mask is not None:
            self.read_by_linear(node, mask)
        elif node.op == "aten.matmul" and mask is not None:
            self.read_by_matmul(node, mask)
        elif self.is_choice(node) and not (node.op in KEEP_ALL and mask is None):
            self.read_by_choice(node, mask)
        else:
            self.read_whole(node)

    def read_whole(self, node: Node) -> None:
        for name in node.inputs:
            self.read(name, None)

    def read(self, name: str, mask: Tensor | None) -> None:
        """These elements of a value are read (None: all of them)."""
        if name in self.whole:
            return
        mask = mask if mask is None or name not in self.masks else mask | self.masks[name]
        if mask is None or bool(mask.all()):
            self.whole.add(name)
            self.masks.pop(name, None)
        else:
            self.masks[name] = mask

    def read_part(self, name: str, index: int, mask: Tensor | None) -> None:
        """These elements of one member of a list are read."""
        parts = self.parts.setdefault(name, {})
        earlier = parts.get(index, mask)
        parts[index] = None if mask is None or earlier is None else mask | earlier

    def read_by_linear(self, node: Node, mask: Tensor) -> None:
        """A channel that is not read leaves a row of the weight unread; a place that is not read, its input."""
        value, weight = (self.graph.nodes[ref.name] for ref in node.args[:2])
        rows = mask.reshape(-1, mask.shape[-1]).any(0)
        self.read(weight.name, rows[:, None].expand(weight.shape))
        self.read(value.name, mask.any(-1, keepdim=True).expand(value.shape))

    def read_by_matmul(self, node: Node, mask: Tensor) -> None:
        """A row of a product reads that row of the left factor, a column that column of the right one."""
        left, right = (self.graph.nodes[ref.name] for ref in node.args[:2])
        if min(len(left.shape), len(right.shape)) < 2:
            self.read_whole(node)
            return
        for factor, lines in ((left, mask.any(-1, keepdim=True)), (right, mask.any(-2, keepdim=True))):
            same = (*factor.shape[:-2], *lines.shape[-2:])
            self.read(factor.name, unbroadcast(lines, same).expand(factor.shape))

    def is_choice(self, node: Node) -> bool:
        """An operation that moves, repeats or leaves out elements of values that depend on the input.

        How much is cut from a parameter itself, a table of positions say, may depend on the length of the input.
        """
        alone = len(node.inputs) == 1 or node.op in ("aten.cat", "aten.stack")
        known = (alone and node.op in SHAPE - INDEXED) or self.fixed_choice(node) is not None
        small = sum(torch.Size(self.graph.nodes[name].shape).numel() for name in node.inputs) <= LARGEST
        of_input = self.graph.depends[node.name][1] or node.op in KEEP_ALL
        return known and small and of_input

    def fixed_choice(self, node: Node) -> tuple[Any, ...] | None:
        """What follows the first argument of an operation that picks elements by constant indices."""
        if node.op == "aten.index_select":
            index = constant_value(self.graph, node.args[2].name)
            return None if index is None else (node.args[1], index)
        indices = known_indices(self.graph, node)
        return None if indices is None else (indices,)

    def read_by_choice(self, node: Node, mask: Tensor | None) -> None:
        choice = self.fixed_choice(node)
        for name in dict.fromkeys(node.inputs if choice is None else [node.args[0].name]):
            shape = self.graph.nodes[name].shape
            found = torch.zeros(shape, dtype=torch.bool)
            cut_to_input = False
            if node.op in VIEWS:
                chosen: Value = self.run(node, name, found)
                for part, read in self.each_part(node, chosen, mask):
                    part |= True if read is None else read
                    cut_to_input |= self.fits_input(node, shape, part.shape)
            else:
                places = torch.arange(found.numel()).reshape(shape)
                chosen = self.run(node, name, places) if choice is None else node.operation.target(places, *choice)
                for part, read in self.each_part(node, chosen, mask):
                    taken = part if read is None else part[read]
                    found.view(-1)[taken[taken >= 0]] = True
                    cut_to_input |= self.fits_input(node, shape, part.shape)
            self.read(name, None if cut_to_input else found)

    def run(self, node: Node, name: str, value: Tensor) -> Value:
        """The operation on one operand, with −1 in place of the others."""
        others = {n: torch.full(self.graph.nodes[n].shape, -1) for n in node.inputs if n != name}
        arguments = substitute(node.args, lambda n: value if n == name else others[n])
        return node.operation.target(*arguments, **node.kwargs)

    def each_part(self, node: Node, chosen: Value, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The parts of a result that are read, and which of their elements."""
        if isinstance(chosen, Tensor):
            yield chosen, mask
            return
        for index, part in enumerate(chosen):
            if index in self.parts.get(node.name, {}):
                yield part, self.parts[node.name][index]

    def fits_input(self, node: Node, whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
        """Whether a value may be cut to a size of the input, or to its pairs of places: a larger input reads more."""
        pairs = zip(whole, part, strict=False)
        return node.op in BOUNDED and len(whole) == len(part) and any(n > m and m in self.lengths for n, m in pairs)


def sizes_of(node: Node) -> tuple[int, ...]:
    """How long an input is: tokens of a sequence, rows and columns of an image; not the batch, not channels."""
    if not node.is_float:
        return node.shape[1:] or node.shape
    return node.shape[2:] if len(node.shape) > 3 else node.shape[-2:-1]


def unbroadcast(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Which elements of an operand of this shape are read where these elements of the result are."""
    while mask.ndim > len(shape):
        mask = mask.any(0)
    for axis, size in enumerate(shape):
        mask = mask.any(axis, keepdim=True) if size == 1 else mask
    return mask
