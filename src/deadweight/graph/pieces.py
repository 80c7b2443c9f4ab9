"""Pieces: a parameter that is only read in disjoint slices becomes one parameter per slice.

`nn.MultiheadAttention` stores the weights of queries, keys and values in one tensor and reads three chunks of it; each
chunk is a linear map of its own. A parameter stays one if it is read whole, in overlapping slices, or only in part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Piece, Ref, substitute

SEVERAL = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split"}
ONE = {"aten.slice", "aten.select", "aten.narrow"}


def in_pieces(graph: Graph) -> Graph:
    """The same graph, with a parameter node for each piece of a parameter that is read in pieces."""
    for _ in range(3):  # a piece may be read in pieces again: experts, then gate and up
        split = {name: pieces for name in graph.parameters if (pieces := pieces_of(graph, name))}
        if not split:
            return graph
        graph = replace_by_pieces(graph, split)
    return graph


@dataclass(frozen=True)
class Read:
    """A slice of a parameter, and the node whose value it is."""

    node: str
    piece: Piece


def pieces_of(graph: Graph, name: str) -> list[Read]:
    """The slices through which a parameter is read, if they are disjoint (or the same) and cover it; else none."""
    node = graph.nodes[name]
    if name in graph.outputs or not node.is_float or not graph.users[name]:
        return []
    reads: list[Read] = []
    for reader in graph.users[name]:
        own = list(slices(graph, node, reader))
        if not own:
            return []
        reads += own
    distinct = list(dict.fromkeys(read.piece for read in reads))
    disjoint = all(are_disjoint(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    covered = sum(math.prod(stop - start for start, stop in piece.ranges) for piece in distinct)
    return reads if len(distinct) > 1 and disjoint and covered == math.prod(node.shape) else []


def slices(graph: Graph, node: Node, reader: Node) -> Iterator[Read]:
    """The slices of a parameter that one node reads; none if it reads the parameter in any other way."""
    if reader.op in ONE:
        piece = slice_taken(node, reader, None)
        if piece is not None:
            yield Read(reader.name, piece)
    elif reader.op in SEVERAL:
        parts = graph.users[reader.name]
        pieces = [slice_taken(node, reader, part.args[1]) if part.op == "getitem" else None for part in parts]
        if all(piece is not None for piece in pieces):
            yield from (Read(part.name, piece) for part, piece in zip(parts, pieces, strict=True) if piece is not None)


def slice_taken(node: Node, reader: Node, part: int | None) -> Piece | None:
    """The ranges of a slice, read off by slicing the indices of every axis."""
    assert reader.target is not None
    ranges, squeezed = [], list[int]()
    for axis, size in enumerate(node.shape):
        marks = torch.arange(size).reshape([-1 if a == axis else 1 for a in range(len(node.shape))])
        try:
            indices = reader.target(marks.expand(node.shape), *reader.args[1:], **reader.kwargs)
        except (RuntimeError, IndexError, TypeError):
            return None
        indices = indices if part is None else indices[part]
        numbers = indices.unique()
        if not len(numbers) or len(numbers) != int(numbers[-1]) - int(numbers[0]) + 1:
            return None  # a step, or nothing
        ranges.append((int(numbers[0]), int(numbers[-1]) + 1))
        if indices.ndim < len(node.shape) and axis == reader_axis(node, reader):
            squeezed.append(axis)
    return Piece(tuple(ranges), tuple(squeezed))


def reader_axis(node: Node, reader: Node) -> int:
    axis = reader.args[1] if reader.op == "aten.select" and len(reader.args) > 1 else None
    if reader.op == "aten.unbind":
        axis = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("dim", 0)
    return int(axis or 0) % max(len(node.shape), 1)


def are_disjoint(a: Piece, b: Piece) -> bool:
    return any(x[1] <= y[0] or y[1] <= x[0] for x, y in zip(a.ranges, b.ranges, strict=True))


def replace_by_pieces(graph: Graph, split: dict[str, list[Read]]) -> Graph:
    """Slices become parameters; what read a slice reads the piece."""
    names: dict[str, str] = {}
    parameters, tensors, pieces = {}, dict(graph.tensors), dict(graph.pieces)
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        if node.name in split:
            for read in split[node.name]:
                name = f"{node.name}_{'_'.join(f'{a}_{b}' for a, b in read.piece.ranges)}"
                names[read.node] = name
                value = read.piece.of(graph.tensors[node.name])
                nodes[name] = Node(name, "parameter", shape=tuple(value.shape), dtype=node.dtype)
                parameters[name], tensors[name] = graph.parameters[node.name], value
                pieces[name] = graph.pieces[node.name].within(read.piece) if node.name in graph.pieces else read.piece
            del tensors[node.name]
            pieces.pop(node.name, None)
        elif node.name not in names and not any(n in split for n in node.inputs):
            nodes[node.name] = redirect(node, names)
            if node.name in graph.parameters:
                parameters[node.name] = graph.parameters[node.name]
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return dataclasses.replace(
        graph, nodes=nodes, parameters=parameters, tensors=tensors, pieces=pieces, outputs=outputs
    )


def redirect(node: Node, names: dict[str, str]) -> Node:
    def rename(name: str) -> Ref:
        return Ref(names.get(name, name))

    return dataclasses.replace(node, args=substitute(node.args, rename), kwargs=substitute(node.kwargs, rename))


def stored_part(graph: Graph, node: str, tensor: Tensor) -> Tensor:
    """The part of a stored tensor that a parameter node is."""
    piece = graph.pieces.get(node)
    return tensor if piece is None else piece.of(tensor)
