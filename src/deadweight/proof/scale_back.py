"""Scales followed backwards: which parameters must be scaled so that a value is, element by element.

Every element of a value is to be multiplied by the positive number of its group; groups are labels 1, 2, …, label 0
says that the element must stay as it is, and −1 that nothing reads it. Each rule says what its operands must be
multiplied by for that. The walk goes from the value back to parameters; whatever else reads a value on the way asks for
label 0 of what it reads, and where two readers ask for different labels the proof stops. An operation without a rule
stops it as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.operation_groups import CONVOLUTIONS, HOMOGENEOUS_ACTIVATIONS, INDEXED, SHAPE
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked, Step, refuse_large
from deadweight.proof.weights import weight_view

UNREAD = -1
LINEAR_IN_FIRST = {"aten.div", "aten.embedding", "aten.masked_fill", "aten.neg", "aten.mean"} | HOMOGENEOUS_ACTIVATIONS
BackRule = Callable[["ScaleBack", Node, Any], None]
BACK_RULES: dict[str, BackRule] = {}


def back_rule(*ops: str) -> Callable[[BackRule], BackRule]:
    def register(function: BackRule) -> BackRule:
        assert function.__doc__, function
        BACK_RULES.update(dict.fromkeys(ops, function))
        return function

    return register


class ScaleBack:
    """One walk back from the operand `value` of `reader`, which is to be scaled by `labels`.

    `possible` is what `can_be_scaled` says of the graph: of two factors it tells which to try.
    """

    def __init__(self, graph: Graph, possible: dict[str, bool], reader: Node, value: str, labels: Tensor) -> None:
        self.graph, self.possible = graph, possible
        self.asked: dict[str, dict[str, Any]] = {value: {reader.name: labels}}  # value to reader to labels
        self.scaled: dict[str, Tensor] = {}  # parameters, and the label of each of their numbers
        self.visited: dict[str, str] = {}  # nodes whose value is scaled, and the rule that says how
        self.read: set[str] = set()  # nodes that read some of a scaled value
        self.reader = reader

    def run(self) -> None:
        """Raises Blocked where the value cannot be scaled so."""
        for name in reversed(self.graph.nodes):
            if name in self.asked:
                self.visit(self.graph.nodes[name])

    def visit(self, node: Node) -> None:
        refuse_large(node)
        labels = self.parts(node) if several_results(node) else self.together(node)
        flat = torch.cat([part.reshape(-1) for part in labels]) if isinstance(labels, list) else labels
        if not bool((flat > 0).any()):
            return
        self.read.update(reader.name for reader in self.graph.users[node.name])
        if node.name in self.graph.outputs:
            raise Blocked(node.name, "output", "the scaled value is the model's output")
        if node.op == "parameter":
            if not node.is_float:
                raise Blocked(node.name, node.op, "whole numbers are not scaled")
            self.scaled[node.name] = labels  # type: ignore[assignment]
            self.visited[node.name] = "these numbers are scaled"
            return
        rule = BACK_RULES.get(node.op)
        if rule is None:
            raise Blocked(node.name, node.op, "no rule says what scales its result")
        rule(self, node, labels)
        self.visited[node.name] = (rule.__doc__ or "").strip().splitlines()[0].rstrip(".")

    def together(self, node: Node) -> Tensor:
        """What all readers of a value ask for, where they agree."""
        found = torch.full(node.shape, UNREAD, dtype=torch.int64)
        for reader in self.graph.users[node.name]:
            asked = self.asked[node.name].get(reader.name)
            found = agreed(node, found, self.read_unscaled(node, reader) if asked is None else asked)
        return found

    def read_unscaled(self, node: Node, reader: Node) -> Tensor:
        """Label 0 for what the reader reads of a value; a view reads what it shows."""
        if reader.op not in SHAPE - INDEXED or len(reader.inputs) != 1 or several_results(reader):
            return torch.zeros(node.shape, dtype=torch.int64)
        shown = move(self.graph, reader, lambda _: numbers(node.shape))
        found = torch.full((math.prod(node.shape),), UNREAD, dtype=torch.int64)
        found[shown.reshape(-1)] = 0
        return found.reshape(node.shape)

    def parts(self, node: Node) -> list[Tensor]:
        """The same for an operation with several results: what is asked for each of them, 0 where nobody asks."""
        asked = self.asked[node.name]
        parts = move(self.graph, node, lambda n: numbers(self.graph.nodes[n].shape))
        found = [torch.full_like(part, UNREAD) for part in parts]
        for reader in self.graph.users[node.name]:
            place = reader.args[1]
            found[place] = agreed(node, found[place], asked.get(reader.name, torch.zeros_like(found[place])))
        return found

    def ask(self, node: Node, operand: Any, labels: Tensor) -> None:
        """Have an operand scaled; of one that is repeated, the repeats must be scaled alike."""
        if not isinstance(operand, Ref):
            if bool((labels > 0).any()):
                raise Blocked(node.name, node.op, "a constant would have to be scaled")
            return
        shape = self.graph.node(operand).shape
        labels = narrowed(node, labels, shape)
        known = self.asked.setdefault(operand.name, {})
        known[node.name] = agreed(node, known[node.name], labels) if node.name in known else labels

    def steps(self) -> tuple[Step, ...]:
        """Every value that is scaled and all that read it, in the graph's order; the reader undoes the scale."""
        found = {
            name: Step(name, self.graph.nodes[name].op, rule, "scaled", True) for name, rule in self.visited.items()
        }
        for name in self.read - set(found):
            words = "it reads nothing that is scaled"
            found[name] = Step(name, self.graph.nodes[name].op, words, "unchanged", None)
        found[self.reader.name] = Step(
            self.reader.name, self.reader.op, "the factor takes up the scale", "undone", None
        )
        return tuple(found[name] for name in sorted(found, key=self.graph.place.__getitem__))


def several_results(node: Node) -> bool:
    return node.op in ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split")


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def agreed(node: Node, left: Tensor, right: Tensor) -> Tensor:
    """Both demands at once; an element that is asked for in two ways stops the proof."""
    if bool(((left != right) & (left != UNREAD) & (right != UNREAD)).any()):
        raise Blocked(node.name, node.op, "its readers want different scales")
    return torch.where(left == UNREAD, right, left)


def narrowed(node: Node, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Labels of a broadcast result for an operand of this shape: along an axis that was broadcast they must agree."""
    while labels.ndim > len(shape):
        labels = alike(node, labels, 0).squeeze(0)
    for axis, size in enumerate(shape):
        if size == 1:
            labels = alike(node, labels, axis)
    return labels


def alike(node: Node, labels: Tensor, axis: int) -> Tensor:
    """The one label along an axis, of length one; unread elements have none."""
    highest = labels.amax(axis, keepdim=True)
    if bool(((labels != highest) & (labels != UNREAD)).any()):
        raise Blocked(
            node.name, node.op, "it would have to be scaled differently along an axis that it sums or repeats"
        )
    return highest


def can_be_scaled(graph: Graph) -> dict[str, bool]:
    """For every node whether its value is linear in some parameters, as far as the rules see: a guide, no proof."""
    found: dict[str, bool] = {}
    for node in graph.nodes.values():
        operands = [found[n] for n in node.inputs]
        if node.op == "parameter":
            found[node.name] = node.is_float
        elif node.op in ("aten.mul", "aten.matmul"):
            found[node.name] = any(operands)
        elif node.op == "linear" or node.op in CONVOLUTIONS:
            found[node.name] = found[node.args[1].name]
        elif node.op in LINEAR_IN_FIRST:
            found[node.name] = operands[0]
        elif node.op in BACK_RULES:
            found[node.name] = bool(operands) and all(operands)
        else:
            found[node.name] = False
    return found


@back_rule(*(SHAPE - INDEXED))
def shape(walk: ScaleBack, node: Node, labels: Any) -> None:
    """It moves elements: each is scaled where it comes from."""
    if node.op == "getitem":
        if not several_results(walk.graph.node(node.args[0])):
            raise Blocked(node.name, node.op, "no rule says what scales one of several results")
        walk.asked.setdefault(node.args[0].name, {})[node.name] = labels
        return
    starts, total = {}, 0
    for name in dict.fromkeys(node.inputs):
        starts[name] = total
        total += math.prod(walk.graph.nodes[name].shape)
    moved = move(walk.graph, node, lambda n: numbers(walk.graph.nodes[n].shape) + starts[n])
    pairs = zip(moved, labels, strict=True) if isinstance(moved, (list, tuple)) else [(moved, labels)]
    found = torch.full((total,), UNREAD, dtype=torch.int64)
    for sources, wanted in pairs:
        sources, wanted = sources.reshape(-1), wanted.expand(sources.shape).reshape(-1)
        read = wanted != UNREAD
        new = torch.full((total,), UNREAD, dtype=torch.int64)
        new[sources[read]] = wanted[read]
        if not torch.equal(new[sources[read]], wanted[read]):
            raise Blocked(node.name, node.op, "it repeats an element that would have to be scaled in two ways")
        found = agreed(node, found, new)
    for name, start in starts.items():
        size = walk.graph.nodes[name].shape
        walk.ask(node, Ref(name), found[start : start + math.prod(size)].reshape(size))


@back_rule("aten.add", "aten.sub")
def addition(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """A sum is scaled if both of its terms are."""
    for operand in node.args[:2]:
        walk.ask(node, operand, labels)


@back_rule("aten.neg", "aten.dropout", *HOMOGENEOUS_ACTIVATIONS)
def homogeneous(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """f(s·x) = s·f(x) for s > 0."""
    walk.ask(node, node.args[0], labels)


@back_rule("aten.masked_fill")
def masked(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """0 and −∞ are what they are times any positive number."""
    if node.args[2] not in (0, -math.inf):
        raise Blocked(node.name, node.op, "it fills in a number that would have to be scaled")
    walk.ask(node, node.args[0], labels)
    walk.asked.setdefault(node.args[1].name, {})[node.name] = torch.zeros(walk.graph.node(node.args[1]).shape).long()


@back_rule("aten.mul", "aten.div")
def product(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """A product is scaled if one of its factors is, a quotient if its dividend is."""
    if node.kwargs:
        raise Blocked(node.name, node.op, "the quotient is rounded")
    left, right = node.args[:2]
    second = node.op == "aten.mul" and isinstance(right, Ref) and not walk.possible[left.name]
    ask_one(walk, node, (right, left) if second else (left, right), labels)


def ask_one(walk: ScaleBack, node: Node, operands: tuple[Any, Any], labels: Tensor) -> None:
    """The first operand is scaled, the second must stay: one value that is both cannot do that."""
    walk.ask(node, operands[0], labels)
    if isinstance(operands[1], Ref):
        walk.ask(node, operands[1], torch.zeros(walk.graph.node(operands[1]).shape, dtype=torch.int64))


@back_rule("linear", *CONVOLUTIONS)
def linear(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """Row c of the weight scales output c, at all positions alike."""
    view = weight_view(walk.graph, node, rows_only=True) if node.op in CONVOLUTIONS else None
    if node.op in CONVOLUTIONS and view is None:
        raise Blocked(node.name, node.op, "its weight is not a parameter used whole")
    weight = walk.graph.node(node.args[1])
    if len(weight.shape) < 2:
        raise Blocked(node.name, node.op, "its weight is a vector, which has no rows")
    channel = 1 if node.op in CONVOLUTIONS else len(node.shape) - 1
    for axis in range(len(node.shape)):
        labels = labels if axis == channel else alike(node, labels, axis)
    output = 0 if view is None else view.output
    rows = labels.reshape([-1 if a == output else 1 for a in range(len(weight.shape))]).expand(weight.shape)
    ask_one(walk, node, (node.args[1], node.args[0]), rows)
    if len(node.args) > 2 and isinstance(node.args[2], Ref):
        walk.ask(node, node.args[2], labels.reshape(-1))


@back_rule("aten.embedding")
def lookup(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """A table scales what is looked up, at all positions alike."""
    for axis in range(len(node.shape) - 1):
        labels = alike(node, labels, axis)
    walk.ask(node, node.args[0], labels.reshape(-1).expand(walk.graph.node(node.args[0]).shape))


@back_rule("aten.matmul")
def matmul(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """The rows of the left factor scale rows, the columns of the right factor columns."""
    left, right = (walk.graph.node(a) for a in node.args[:2])
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise Blocked(node.name, node.op, "it multiplies vectors")
    first = walk.possible[left.name]
    one, other = (left, right) if first else (right, left)
    labels = alike(node, labels, -1 if first else -2)
    wide = labels.expand(*labels.shape[:-2], *one.shape[-2:])
    ask_one(walk, node, (Ref(one.name), Ref(other.name)), wide)


@back_rule("aten.sum", "aten.mean")
def reduction(walk: ScaleBack, node: Node, labels: Tensor) -> None:
    """A sum over an axis is scaled if all of its terms are scaled alike."""
    before = walk.graph.node(node.args[0])
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    axes = [axes] if isinstance(axes, int) else axes or list(range(len(before.shape)))
    kept = [1 if a in {x % len(before.shape) for x in axes} else n for a, n in enumerate(before.shape)]
    walk.ask(node, node.args[0], labels.reshape(kept).expand(before.shape))
