"""Absorbers: parameters that can undo a constant shift at a node, and have no other effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Graph, Node, Value, substitute
from deadweight.proof.labels import Labels, compact, constant_along
from deadweight.proof.operation_groups import SHAPE
from deadweight.proof.readers import centred_reader

KEEPS_ELEMENTS = {"aten.reshape", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.t"}
KEEPS_ELEMENTS |= {"aten.expand"}
LISTS = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.hsplit", "aten.unbind"}


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
    operands: frozenset[str] = frozenset()  # "node:place": where the parameter is read on the way there
    shared: bool = False  # it is added at other places too, all of which must need the same motion of it
    again: bool = False  # one of those places: the motion is counted at the first

    def amounts(self, label: Labels) -> Labels | None:
        """One label per absorbing element, if equal indices always carry equal labels."""
        index = self.index.expand(label.shape)
        repeated = [axis for axis, n in enumerate(index.shape) if n > 1 and index.stride(axis) == 0]
        if not constant_along(label, tuple(repeated)):
            return None
        for axis in repeated:
            index, label = index.narrow(axis, 0, 1), label.narrow(axis, 0, 1)
        index, flat = index.reshape(-1), label.reshape(-1)
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
    found = list(summands(graph, node, taken)) if node.op == "aten.add" and node.kwargs.get("alpha", 1) == 1 else []
    alone = [read_nowhere_else(graph, f) for f in found]
    for f, own in sorted(zip(found, alone, strict=True), key=lambda pair: not pair[1]):  # shared ones last
        if own or (f.kind == "bias" and only_added(graph, f.parameter)):
            yield Absorber(f.parameter, f.kind, f.index.expand(node.shape), node.name, f.operands, not own)
    if weights and node.op == "linear" and not followed_by_bias(graph, node, taken):
        yield from lost_direction(graph, node, node.shape, taken)


@dataclass(frozen=True)
class Produced:
    """A parameter that a value is made of: the element at each place, and the operands that read it on the way."""

    parameter: str
    kind: str
    index: Tensor
    operands: frozenset[str]  # "node:place"


def summands(graph: Graph, node: Node, taken: frozenset[str]) -> Iterator[Produced]:
    """What the operands of a sum are made of."""
    for place, name in enumerate(node.inputs):
        yield from producers(graph, name, f"{node.name}:{place}", taken)


def producers(graph: Graph, name: str, operand: str, taken: frozenset[str]) -> Iterator[Produced]:
    """The parameters of which every element at some place is one element, times one, plus something else."""
    node, view = graph.nodes[name], parameter_view(graph, name)
    if name in taken:
        return
    if view is not None:
        if view[0] not in taken:
            yield Produced(view[0], "bias", view[1], frozenset({operand}))
    elif len(graph.users[name]) != 1:
        return
    elif node.op == "aten.embedding":
        yield from table_rows(graph, node, taken)
    elif node.op == "aten.add" and node.kwargs.get("alpha", 1) == 1:
        for found in summands(graph, node, taken):
            yield replace(found, index=found.index.expand(node.shape))
    elif node.op == "aten.cat":
        yield from side_by_side(graph, node, taken)
    elif node.op in KEEPS_ELEMENTS:
        for found in producers(graph, node.args[0].name, f"{name}:0", taken):
            yield replace(found, index=run_on(node, found.index))


def table_rows(graph: Graph, node: Node, taken: frozenset[str]) -> Iterator[Produced]:
    """A table that nothing else reads: its rows one by one where they are always the same, and all rows alike."""
    table, operands = node.args[0].name, frozenset({f"{node.name}:0"})
    if graph.nodes[table].op != "parameter" or len(graph.users[table]) != 1 or table in taken:
        return
    if not graph.nodes[table].is_float:  # whole numbers cannot take an amount over
        return
    rows, columns = constant_value(graph, node.args[1].name), torch.arange(node.shape[-1])
    if rows is not None:  # always the same rows: each is a vector of its own
        yield Produced(table, "bias", rows.unsqueeze(-1) * node.shape[-1] + columns, operands)
    yield Produced(table, "table", columns.expand(node.shape), operands)


def side_by_side(graph: Graph, node: Node, taken: frozenset[str]) -> Iterator[Produced]:
    """A concatenation of parts that are all made of one parameter."""
    parts = [
        {found.parameter: found for found in producers(graph, name, f"{node.name}:{place}", taken)}
        for place, name in enumerate(node.inputs)
    ]
    for parameter in parts[0]:
        found = [part[parameter] for part in parts if parameter in part]
        if len(found) == len(parts) and all(f.kind == "bias" for f in found):
            pieces = [f.index.expand(graph.nodes[n].shape) for f, n in zip(found, node.inputs, strict=True)]
            axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            yield Produced(parameter, "bias", torch.cat(pieces, axis), frozenset().union(*(f.operands for f in found)))


def read_nowhere_else(graph: Graph, produced: Produced) -> bool:
    """Whether every element of a parameter that would move is read on the way to this place only, slice by slice."""
    others = [(o, index) for o, index in readings(graph, produced.parameter).items() if o not in produced.operands]
    if not others:
        return True
    if produced.kind != "bias":
        return False
    moving = torch.zeros(torch.Size(graph.nodes[produced.parameter].shape).numel(), dtype=torch.bool)
    moving[compact(produced.index).reshape(-1)] = True
    return not any(bool(moving[compact(index).reshape(-1)].any()) for _, index in others)


def only_added(graph: Graph, parameter: str) -> bool:
    """Whether additions are all that reads a parameter: a bias of a layer that is used several times."""
    return all(graph.nodes[o.partition(":")[0]].op == "aten.add" for o in readings(graph, parameter))


def readings(graph: Graph, parameter: str) -> dict[str, Tensor]:
    """Every operand, behind views of a parameter, and the elements that it reads; what is returned is read too."""
    result: dict[str, Tensor] = {}
    stack = [parameter]
    while stack:
        name = stack.pop()
        view = parameter_view(graph, name)
        for reader in graph.users[name]:
            if parameter_view(graph, reader.name) is not None or reader.op in LISTS:
                stack.append(reader.name)
            else:
                index = whole(graph.nodes[parameter]) if view is None else view[1]
                result |= {f"{reader.name}:{place}": index for place, n in enumerate(reader.inputs) if n == name}
    return result


def parameter_view(graph: Graph, name: str) -> tuple[str, Tensor] | None:
    """A parameter behind operations that only move, repeat or pick elements, and which element stands at each place."""
    node, chain = graph.nodes[name], list[Node]()
    while node.op in SHAPE and len(node.inputs) == 1 and node.target is not None:
        chain.append(node)
        node = graph.nodes[node.inputs[0]]
    if node.op != "parameter" or not node.is_float or (chain and chain[0].op in LISTS):
        return None
    index: Value = whole(node)
    try:
        for view in reversed(chain):
            index = index[view.args[1]] if view.op == "getitem" else run_on(view, index)
    except (RuntimeError, TypeError, IndexError):
        return None
    return node.name, index


def whole(node: Node) -> Tensor:
    return torch.arange(torch.Size(node.shape).numel()).reshape(node.shape)


def run_on(node: Node, value: Tensor) -> Value:
    assert node.target is not None
    return node.target(*substitute(node.args, lambda _: value), **node.kwargs)


def followed_by_bias(graph: Graph, node: Node, taken: frozenset[str]) -> bool:
    """Whether the only reader adds a parameter, which is the simpler place to absorb."""
    users = graph.users[node.name]
    if len(users) != 1 or users[0].op != "aten.add":
        return False
    others = [(i, name) for i, name in enumerate(users[0].inputs) if name != node.name]
    found = (f for i, name in others for f in producers(graph, name, f"{users[0].name}:{i}", taken))
    return any(read_nowhere_else(graph, f) for f in found)


def lost_direction(graph: Graph, node: Node, shape: tuple[int, ...], taken: frozenset[str]) -> Iterator[Absorber]:
    """W += u(1/γ)ᵀ adds the constant u·Σ(β/γ) behind a LayerNorm that has a shift."""
    reader = centred_reader(graph, node)
    if reader is None or reader.shift is None or reader.weight in taken:
        return
    yield Absorber(reader.weight, "lost", torch.arange(shape[-1]).expand(shape), node.name)
