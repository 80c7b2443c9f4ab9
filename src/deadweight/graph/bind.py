"""Example inputs by the names of the graph's input nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.graph.node import Graph, Node
from deadweight.graph.operations import VIEWS
from deadweight.source.type_aliases import Arguments, Leaf


def bind(graph: Graph, args: Arguments, kwargs: Mapping[str, Leaf]) -> dict[str, Tensor]:
    """Input tensors by node name: by keyword where a node has that name, else in order. Floats become float64."""
    named = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and k in graph.inputs}
    rest = pytree.tree_leaves((args, {k: v for k, v in kwargs.items() if k not in named}))
    tensors = [v for v in rest if isinstance(v, Tensor)]
    places = [name for name in graph.inputs if name not in named]
    if len(places) != len(tensors):
        raise DeadweightError(
            f"found {len(tensors) + len(named)} input tensors; expected {len(graph.inputs)}, as in the example that "
            f"was traced ({', '.join(graph.inputs) or 'none'}): pass the same arguments"
        )
    bound = {**named, **dict(zip(places, tensors, strict=True))}
    for name, value in bound.items():
        refuse_unlike(name, value, graph.nodes[name])
    return {name: value.to(torch.float64) if value.is_floating_point() else value for name, value in bound.items()}


def refuse_unlike(name: str, value: Tensor, traced: Node) -> None:
    """Raise if an input differs from the example in shape, or in being floating-point."""
    if tuple(value.shape) != traced.shape:
        raise DeadweightError(
            f"input {name} has shape {tuple(value.shape)}; expected {traced.shape}, as in the example that was traced"
        )
    if traced.dtype is not None and value.is_floating_point() != traced.dtype.is_floating_point:
        raise DeadweightError(
            f"input {name} has dtype {value.dtype}; expected {traced.dtype}, as in the example that was traced"
        )


def index_ranges(graph: Graph) -> dict[str, int]:
    """For integer inputs that index a table: how many rows there are to choose from."""
    ranges: dict[str, int] = {}
    for name in graph.inputs:
        if not graph.nodes[name].is_float:
            for rows in tables_indexed(graph, name):
                ranges[name] = min(rows, ranges.get(name, rows))
    return ranges


def tables_indexed(graph: Graph, name: str) -> Iterator[int]:
    for node in graph.users[name]:
        if node.op == "aten.embedding" and node.args[1].name == name:
            yield graph.node(node.args[0]).shape[0]
        elif node.op in VIEWS:
            yield from tables_indexed(graph, node.name)
