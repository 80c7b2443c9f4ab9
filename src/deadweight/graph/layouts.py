"""Layouts: a parameter of several axes that is only read as one matrix, or as one vector, becomes that one.

`nn.Parameter(torch.empty(d, h, k))` with `einsum("btd,dhk->bthk", x, w)` is a linear map to h·k outputs, stored with
the heads on an axis of their own. What is read is the matrix; the way to it from what is stored is its layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deadweight.graph.node import Graph, Node, Piece, Ref, View, substitute
from deadweight.graph.views import order_of_axes

RESHAPES = {"aten.reshape", "aten.unsqueeze", "aten.squeeze"}
PERMUTES = {"aten.permute", "aten.transpose", "aten.t"}


def in_layouts(graph: Graph) -> Graph:
    """The same graph, with parameters in the layout in which linear maps and sums read them."""
    found = {name: layout for name in graph.parameters if (layout := layout_of(graph, name))}
    return read_in_layouts(graph, found) if found else graph


@dataclasses.dataclass(frozen=True)
class Layout:
    """The views from what is stored to what is read, and the nodes that hold the last of them."""

    views: tuple[View, ...]
    shape: tuple[int, ...]
    nodes: frozenset[str]


def layout_of(graph: Graph, name: str) -> Layout | None:
    """The one layout in which a parameter of two axes or more is read everywhere; None if there is none."""
    node = graph.nodes[name]
    if len(node.shape) < 2 or not node.is_float or name in graph.outputs:
        return None
    readings = list(each_reading(graph, node, ()))
    if not readings or any(reading is None for reading in readings):
        return None
    layouts = {(views, read.shape) for views, read in filter(None, readings)}
    views, shape = layouts.pop()
    if layouts or all(kind == "permute" for kind, _ in views):
        return None
    return Layout(views, shape, frozenset(read.name for _, read in filter(None, readings)))


def each_reading(graph: Graph, node: Node, views: tuple[View, ...]) -> Iterator[tuple[tuple[View, ...], Node] | None]:
    """The views at which linear maps or sums read a parameter; None where something else reads it."""
    for reader in graph.users[node.name]:
        if (view := view_taken(reader)) is not None and reader.name not in graph.outputs:
            yield from each_reading(graph, reader, joined(views, view))
        elif is_weight(reader, node) or is_added_vector(reader, node):
            yield views, node
        else:
            yield None


def is_weight(reader: Node, node: Node) -> bool:
    return (
        reader.op == "linear" and len(node.shape) == 2 and [a == Ref(node.name) for a in reader.args] == [False, True]
    )


def is_added_vector(reader: Node, node: Node) -> bool:
    return reader.op == "aten.add" and len(node.shape) == 1 and reader.inputs.count(node.name) == 1


def view_taken(node: Node) -> View | None:
    """What a node does to the axes of its operand, if it keeps every element once."""
    if node.op in RESHAPES:
        return "reshape", node.shape
    if node.op in PERMUTES and (order := order_of_axes(node)) is not None:
        return "permute", tuple(order)
    return None


def joined(views: tuple[View, ...], view: View) -> tuple[View, ...]:
    """One more view; two of one kind are one."""
    kind, numbers = view
    if not views or views[-1][0] != kind:
        return (*views, view)
    if kind == "reshape":
        return (*views[:-1], view)
    order = tuple(views[-1][1][axis] for axis in numbers)
    return views[:-1] if order == tuple(sorted(order)) else (*views[:-1], (kind, order))


def read_in_layouts(graph: Graph, found: dict[str, Layout]) -> Graph:
    """The parameters in their layouts; what read a view reads the parameter."""
    names = {read: name for name, layout in found.items() for read in layout.nodes}
    tensors, pieces, nodes = dict(graph.tensors), dict(graph.pieces), dict(graph.nodes)
    for name, layout in found.items():
        nodes[name] = dataclasses.replace(nodes[name], shape=layout.shape)
        if name in tensors:
            tensors[name] = Piece((), views=layout.views).of(tensors[name])
        pieces[name] = dataclasses.replace(pieces.get(name, Piece(())), views=layout.views)
    nodes = {k: redirected(node, names) for k, node in nodes.items()}
    result = dataclasses.replace(graph, nodes=nodes, tensors=tensors, pieces=pieces)
    live = result.live
    kept = {k: n for k, n in nodes.items() if k in live or k in graph.parameters or n.op == "input"}
    return dataclasses.replace(result, nodes=kept)


def redirected(node: Node, names: dict[str, str]) -> Node:
    if not any(name in names for name in node.inputs):
        return node

    def rename(name: str) -> Ref:
        return Ref(names.get(name, name))

    return dataclasses.replace(node, args=substitute(node.args, rename), kwargs=substitute(node.kwargs, rename))
