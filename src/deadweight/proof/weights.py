"""Weights as the graph uses them: which parameter, which way round, which rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.operation_groups import CONVOLUTIONS

VIEWS = ("aten.t", "aten.transpose", "aten.permute", "aten.reshape", "aten.unsqueeze", "aten.expand")


@dataclass(frozen=True)
class WeightView:
    """A weight used whole, possibly transposed: `output`, `input` and `expert` are the parameter's axes."""

    parameter: str
    output: int
    input: int
    expert: int | None = None  # where there is one matrix for each expert


def weight_view(graph: Graph, node: Node, *, rows_only: bool = False) -> WeightView | None:
    """The parameter behind a linear map or convolution, if it is used whole and its numbers are no integers.

    Of a convolution in groups only the rows are those of one matrix, one for each channel of the output. The kernels
    of a transposed convolution have the channels that it reads first.
    """
    if node.op in CONVOLUTIONS:
        found = graph.node(node.args[1])
        batched = len(node.shape) == len(found.shape)
        plain = found.op == "parameter" and found.is_float and batched and not reads_itself(graph, node, found)
        plain = plain and (groups_of(node) == 1 or (rows_only and not is_transposed(node)))
        output = int(is_transposed(node))
        return WeightView(found.name, output, 1 - output) if plain else None
    if node.op == EXPERTS:
        found = graph.node(node.args[1])
        return None if reads_itself(graph, node, found) else WeightView(found.name, 3 - node.args[3], node.args[3], 0)
    if node.op != "linear":
        return None
    ref, turned = node.args[1], False
    while isinstance(ref, Ref):
        found = graph.node(ref)
        if found.op == "parameter":
            whole = found.is_float and len(found.shape) == 2 and not reads_itself(graph, node, found)
            return WeightView(found.name, int(turned), int(not turned)) if whole else None
        if found.op not in ("aten.t", "aten.transpose", "aten.permute"):
            return None
        ref, turned = found.args[0], not turned
    return None


def reads_itself(graph: Graph, node: Node, weight: Node) -> bool:
    """Whether the weight is what the map reads, too: then nothing is linear in it."""
    data = graph.node(node.args[0])
    while data.op in VIEWS and isinstance(data.args[0], Ref):
        data = graph.node(data.args[0])
    return data is weight


def groups_of(node: Node) -> int:
    position = 8 if node.op == "aten.convolution" else 6
    return int(node.args[position]) if len(node.args) > position else int(node.kwargs.get("groups", 1))


def is_transposed(node: Node) -> bool:
    return node.op == "aten.convolution" and bool(node.args[6])


def numbered(size: int, offset: int = 0) -> Tensor:
    return torch.arange(1 + offset, size + 1 + offset)


def uses_of(graph: Graph, parameter: str) -> Iterable[str]:
    """The nodes that compute with a parameter, behind views of it."""
    stack = [parameter]
    while stack:
        for node in graph.users[stack.pop()]:
            if node.op in VIEWS:
                stack.append(node.name)
            else:
                yield node.name
