"""DW014 vector by vector: each vector that a norm reads, and that parameters of its own write, has a scale of its own.

A table that is looked up and normed: the norm reads one row at a time, so every row may be scaled by itself. A
projection that is normed head by head: the rows of one head, with their biases, may be scaled by themselves. Exact if
the norm's ε were 0. Needs that nothing but norms reads what is scaled: the walk below goes through operations that only
move elements, additions of biases and products with a number, and leaves out whatever reaches anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.node import Graph, Node, Ref, Value
from deadweight.proof.labels import compact, constant_along
from deadweight.proof.operation_groups import INDEXED, SHAPE
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked, Step
from deadweight.proof.weights import uses_of, weight_view
from deadweight.search.prover import Prover
from deadweight.search.shifts import without_unread

NORMS = ("core.layer", "core.rms", "core.unit")


@dataclass(frozen=True, kw_only=True)
class LineScaleClaim(Claim):
    """Rows of `scaled` parameters in one group (0: none) are multiplied by one number."""

    scaled: tuple[tuple[str, int, Tensor], ...]  # parameter, its axis, and the group at each index of that axis

    def motions(self, point: Point) -> Iterator[Motion]:
        for number in self.numbers():
            yield self.times(point, {number: 1.0})

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        numbers = self.numbers()
        return self.times(point, dict(zip(numbers, normal(generator, len(numbers)).tolist(), strict=True)))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        numbers = self.numbers()
        growth = torch.rand(len(numbers), generator=generator, dtype=torch.float64) - 0.5
        moved = self.times(point, dict(zip(numbers, growth.tolist(), strict=True)))
        return {name: point.values[name] + t for name, t in moved.items()}

    def numbers(self) -> list[int]:
        return sorted({n for _, _, groups in self.scaled for n in groups.unique().tolist() if n})

    def times(self, point: Point, rates: dict[int, float]) -> Motion:
        """Every group grows in proportion to itself, at its own rate."""
        motion: Motion = {}
        for name, axis, groups in self.scaled:
            rate = torch.tensor([rates.get(n, 0.0) for n in groups.tolist()], dtype=torch.float64)
            value = point.values[name].to(torch.float64)
            motion[name] = value * rate.reshape([-1 if a == axis else 1 for a in range(value.ndim)])
        return motion


@dataclass
class Way:
    """Where the numbered rows of a parameter go, and what becomes of them."""

    graph: Graph
    numbers: dict[str, Value] = field(default_factory=dict)  # node to the row that each element comes from
    lines: list[Tensor] = field(default_factory=list)  # rows that a norm reads together
    spoilt: set[int] = field(default_factory=set)  # rows that something else reads
    biases: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    epsilon: float = 0.0

    def follow(self, start: Node, numbers: Tensor) -> None:
        self.numbers[start.name] = numbers
        self.note(start, "rows of the parameter are scaled here", True)
        for node in self.graph.downstream([start.name], self.numbers.__contains__):
            if node.name in self.graph.outputs and node.name in self.numbers:
                self.spoil(self.numbers[node.name])
            if node is not start:
                self.visit(node)

    def visit(self, node: Node) -> None:
        known = [n for n in node.inputs if n in self.numbers]
        value = self.numbers[known[0]]
        if node.op in NORMS and node.args[1] == 1 and node.args[0] == Ref(known[0]):
            short = compact(value)
            lines = short.expand(*short.shape[:-1], value.shape[-1])
            self.lines.append(lines.reshape(-1, node.shape[-1]).unique(dim=0))
            self.epsilon = max(self.epsilon, float(node.args[-1]))
            self.note(node, "a norm ignores the scale of the vector it reads", None)
            return
        moved = self.passed_on(node, known, value)
        if moved is None:
            self.spoil(value)
            self.note(node, "something else reads these rows: they are left out", None)
        else:
            self.numbers[node.name] = moved
            self.note(node, "elements move, and are scaled as before", True)

    def passed_on(self, node: Node, known: list[str], value: Value) -> Value:
        """The rows of the result's elements; None where the operation is not one that passes scales on."""
        if node.op == "getitem" and isinstance(value, (list, tuple)):
            return value[node.args[1]]
        if not isinstance(value, Tensor):
            return None
        if node.op in ("aten.mul", "aten.div") and len(node.inputs) == 1 and not node.kwargs:
            return value
        if node.op == "aten.add" and not node.kwargs:
            return self.with_bias(node, known[0], value)
        if node.op in SHAPE - INDEXED and len(node.inputs) == 1:
            try:
                return move(self.graph, node, lambda _: value)
            except Blocked:
                return None
        return None

    def with_bias(self, node: Node, known: str, value: Tensor) -> Tensor | None:
        """A vector that is added, and read nowhere else, is scaled along."""
        others = [a for a in node.args if isinstance(a, Ref) and a.name != known]
        bias = self.graph.node(others[0]) if len(others) == 1 and len(node.args) == 2 else None
        plain = bias is not None and bias.op == "parameter" and bias.shape == node.shape[-1:]
        if bias is None or not plain or len(self.graph.users[bias.name]) != 1 or value.shape != node.shape:
            return None
        if not constant_along(value, tuple(range(value.ndim - 1))):
            return None
        self.biases[bias.name] = value[(0,) * (value.ndim - 1)].clone()
        return value

    def spoil(self, value: Value) -> None:
        for part in value if isinstance(value, (list, tuple)) else [value]:
            self.spoilt.update(compact(part).unique().tolist())

    def note(self, node: Node, rule: str, value: Value) -> None:
        self.steps.append(Step(node.name, node.op, rule, "undone" if value is None else "scaled row by row", value))


def groups_of(way: Way, size: int) -> Tensor:
    """Rows that some norm reads together are one group, named by its first row; 0 where a row cannot be scaled."""
    parent = list(range(size + 1))

    def top(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for lines in way.lines:
        for line in lines.tolist():
            for other in line[1:]:
                parent[max(top(line[0]), top(other))] = min(top(line[0]), top(other))
    bad = {top(i) for i in way.spoilt} | {0}
    read = {i for lines in way.lines for i in lines.unique().tolist()}
    return torch.tensor([top(i) if i in read and top(i) not in bad else 0 for i in range(1, size + 1)])


def find_line_scales(prover: Prover, law: Title) -> Iterator[tuple[LineScaleClaim, list[str]]]:
    """Claims, with the nodes whose scale they speak of."""
    for node in prover.parameters():
        uses = [prover.graph.nodes[use] for use in uses_of(prover.graph, node.name)] if len(node.shape) == 2 else []
        if uses and all(use.op == "aten.embedding" and use.args[0].name == node.name for use in uses):
            followed = of_table(prover, node, uses)
        elif len(uses) == 1 and is_projection(prover.graph, uses[0]):
            followed = of_projection(prover, node, uses[0])
        else:
            continue
        if followed is not None:
            scaled, way = followed
            yield claim_of(law, scaled, way), [use.name for use in uses]


def is_projection(graph: Graph, use: Node) -> bool:
    """Whether a linear map of data uses a parameter as its weight; a map of parameters is another finder's."""
    return graph.depends[use.name][1] and weight_view(graph, use) is not None


Scaled = tuple[tuple[str, int, Tensor], ...]


def of_table(prover: Prover, node: Node, uses: list[Node]) -> tuple[Scaled, Way] | None:
    """Every row that is read: only norms may read what is looked up, and one row at a time."""
    way = Way(prover.graph)
    for use in uses:
        places = torch.Size(use.shape[:-1]).numel()
        way.follow(use, torch.arange(1, places + 1).reshape(*use.shape[:-1], 1).expand(use.shape))
    alone = all(torch.equal(lines, lines[:, :1].expand_as(lines)) for lines in way.lines)
    if way.spoilt or not way.lines or way.biases or not alone:
        return None
    rows = without_unread(prover, node, torch.arange(1, node.shape[0] + 1).reshape(-1, 1).expand(node.shape))
    return ((node.name, 0, rows[:, 0].clone()),), way


def of_projection(prover: Prover, node: Node, use: Node) -> tuple[Scaled, Way] | None:
    """Heads that are normed one by one; a projection that is normed as a whole has one scale, not found here."""
    view = weight_view(prover.graph, use)
    assert view is not None
    size = node.shape[view.output]
    way = Way(prover.graph)
    way.follow(use, torch.arange(1, size + 1).expand(use.shape))
    groups = groups_of(way, size)
    if len(groups[groups != 0].unique()) < 2:
        return None
    biases = [(name, 0, torch.where(rows > 0, groups[rows - 1], 0)) for name, rows in way.biases.items()]
    return ((node.name, view.output, groups), *biases), way


def claim_of(law: Title, scaled: Scaled, way: Way) -> LineScaleClaim:
    first, axis, groups = scaled[0]
    index = torch.nonzero(groups).reshape(-1)
    return LineScaleClaim(
        law=law,
        node=first,
        dof=len(groups[groups != 0].unique()),
        verdict="gauge",
        tier="epsilon",
        into=tuple(parameter for parameter, _, _ in scaled[1:]),
        index=None if len(index) == len(groups) else index,
        axis=axis,
        steps=tuple(way.steps),
        note=f"each vector that the norm reads has a scale; the norm's ε of {way.epsilon:g} is taken for 0",
        epsilon=way.epsilon,
        scaled=scaled,
    )
