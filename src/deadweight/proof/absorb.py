"""Absorbers: parameters that can undo a constant shift at a node, and have no other effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Graph, Node, Ref, substitute
from deadweight.proof.labels import Labels
from deadweight.proof.reading import centred_reader

KEEPS_ELEMENTS = {"aten.reshape", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.t"}


@dataclass(frozen=True)
class Absorber:
    """Moving `parameter` by −amount at `index` undoes a shift by amount; `kind` says which motion is meant.

    bias: its own elements. table: every row alike. lost: a weight along the direction that LayerNorm removed.
    """

    parameter: str  # node name
    kind: str
    index: (
        Tensor  # for every element of the node where the shift is met, the element (or column, or row) that undoes it
    )
    node: str = ""  # where it was met

    def amounts(self, label: Labels) -> Labels | None:
        """One label per absorbing element, if equal indices always carry equal labels."""
        index = self.index.expand(label.shape).reshape(-1)
        flat = label.reshape(-1)
        size = int(index.max()) + 1 if len(index) else 0
        found = torch.zeros(size, dtype=torch.int64)
        found[index] = flat
        return found if torch.equal(found[index], flat) else None

    def words(self) -> str:
        how = {"bias": "", "table": "every row of ", "lost": "the direction that LayerNorm removed, in "}[self.kind]
        return f"{how}{self.parameter}"


def find_absorber(graph: Graph, node: Node, taken: frozenset[str], *, weights: bool = False) -> Iterator[Absorber]:
    """Every parameter that can shift this node's value by a constant without touching anything else.

    With `weights`, also the weight of a linear map without a bias, along the direction that LayerNorm removed.
    """
    if node.op == "aten.add" and node.kwargs.get("alpha", 1) == 1:
        for ref in node.args:
            if isinstance(ref, Ref) and ref.name not in taken:
                yield from within(graph, ref.name, node, taken)
    if weights and node.op == "linear" and not followed_by_bias(graph, node, taken):
        yield from lost_direction(graph, node, node.shape, taken)


def within(graph: Graph, name: str, top: Node, taken: frozenset[str]) -> Iterator[Absorber]:
    """Absorbers inside one operand, whose every value on the way is read once only."""
    for parameter, kind, index in producers(graph, name, taken):
        yield Absorber(parameter, kind, index.expand(top.shape), top.name)


def producers(graph: Graph, name: str, taken: frozenset[str]) -> Iterator[tuple[str, str, Tensor]]:
    node = graph.nodes[name]
    if len(graph.users[name]) != 1 or name in taken or name in graph.outputs:
        return
    if node.op == "parameter" and node.is_float:
        size = torch.Size(node.shape).numel()
        yield name, "bias", torch.arange(size).reshape(node.shape)
    elif node.op == "aten.embedding":
        table = node.args[0].name
        if graph.nodes[table].op == "parameter" and len(graph.users[table]) == 1 and table not in taken:
            rows = constant_value(graph, node.args[1].name)
            if rows is not None:  # always the same rows: each is a vector of its own
                yield table, "bias", rows.unsqueeze(-1) * node.shape[-1] + torch.arange(node.shape[-1])
            yield table, "table", torch.arange(node.shape[-1]).expand(node.shape)
    elif node.op == "aten.add" and node.kwargs.get("alpha", 1) == 1:
        for ref in node.args:
            if isinstance(ref, Ref):
                for parameter, kind, index in producers(graph, ref.name, taken):
                    yield parameter, kind, index.expand(node.shape)
    elif node.op in KEEPS_ELEMENTS or (node.op == "aten.expand" and node.target is not None):
        for parameter, kind, index in producers(graph, node.args[0].name, taken):
            yield parameter, kind, run_on(node, index)


def run_on(node: Node, value: Tensor) -> Tensor:
    assert node.target is not None
    result = node.target(*substitute(node.args, lambda _: value), **node.kwargs)
    assert isinstance(result, Tensor)
    return result


def followed_by_bias(graph: Graph, node: Node, taken: frozenset[str]) -> bool:
    """Whether the only reader adds a parameter, which is the simpler place to absorb."""
    users = graph.users[node.name]
    if len(users) != 1 or users[0].op != "aten.add":
        return False
    others = [r.name for r in users[0].args if isinstance(r, Ref) and r.name != node.name]
    return any(True for name in others for _ in producers(graph, name, taken))


def lost_direction(graph: Graph, node: Node, shape: tuple[int, ...], taken: frozenset[str]) -> Iterator[Absorber]:
    """W += u(1/γ)ᵀ adds the constant u·Σ(β/γ) behind a LayerNorm that has a shift."""
    reader = centred_reader(graph, node)
    if reader is None or reader.shift is None or reader.weight in taken:
        return
    if len(graph.users[reader.weight]) == 1:
        yield Absorber(reader.weight, "lost", torch.arange(shape[-1]).expand(shape), node.name)
