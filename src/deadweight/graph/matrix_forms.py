"""Matrix forms: a parameter of many axes that is only read as one matrix, or as one vector, becomes that.

einsum("btd,hdk->bthk", x, w) multiplies x by a matrix of d rows and h·k columns: all that is known of linear maps holds
for it. Its bias of h × k numbers is a vector of h·k, added before the heads are told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from deadweight.graph.node import Argument, Graph, Node, Piece, Ref, View
from deadweight.graph.operations import ADD, PERMUTE, RESHAPE
from deadweight.graph.pieces import redirect
from deadweight.graph.rewriting import Canonicaliser
from deadweight.graph.views import KEPT_ORDERS, order_of_axes

RESHAPES = ("aten.reshape", "aten.unsqueeze", "aten.squeeze")


@dataclass(frozen=True)
class Form:
    """The views that lead from a parameter to the form in which all its readers read it."""

    shape: tuple[int, ...]
    views: tuple[View, ...]
    ends: tuple[str, ...]  # the nodes that have this form


def in_matrix_form(graph: Graph) -> Graph:
    """The same graph, with parameters in the form of the matrix or vector that is read."""
    forms = {name: form for name in graph.parameters if (form := form_of(graph, name)) is not None}
    if not forms:
        return graph
    names = {end: name for name, form in forms.items() for end in form.ends}
    nodes, tensors, pieces = dict[str, Node](), dict(graph.tensors), dict(graph.pieces)
    for node in graph.nodes.values():
        if node.name in forms:
            form = forms[node.name]
            nodes[node.name] = dataclasses.replace(node, shape=form.shape)
            stored = pieces.get(node.name, Piece(tuple((0, n) for n in node.shape), whole=True))
            pieces[node.name] = dataclasses.replace(stored, views=form.views)
            tensors[node.name] = follow(tensors[node.name], form.views)
        elif node.name not in names:
            nodes[node.name] = redirect(node, names)
    result = dataclasses.replace(graph, nodes=nodes, tensors=tensors, pieces=pieces)
    live = result.live
    kept = {k: n for k, n in nodes.items() if k in live or n.op in ("parameter", "input")}
    return dataclasses.replace(result, nodes=kept)


def form_of(graph: Graph, name: str) -> Form | None:
    """The matrix or vector as which a parameter of more axes is read everywhere, or a matrix read of a flat vector."""
    node = graph.nodes[name]
    if not node.is_float or name in graph.outputs or not graph.users[name]:
        return None
    ways = list(ways_to_readers(graph, node))
    first = ways[0]
    ends = tuple(end.name for end, _ in ways)
    shape = first[0].shape
    known = all(end.shape == shape for end, _ in ways)
    plain = all(axes(view.shape) == axes(node.shape) for view in first[1])  # a transposed matrix is none of these
    if not known or plain or axes(shape) > 2 or len(shape) > 2 or name in ends:
        return None
    numbers = torch.arange(prod(node.shape)).reshape(node.shape)
    order = follow(numbers, first[1])
    if any(not torch.equal(follow(numbers, views), order) for _, views in ways[1:]):
        return None
    return Form(shape, tuple(first[1]), ends)


def axes(shape: tuple[int, ...]) -> int:
    """The number of axes longer than one."""
    return sum(n > 1 for n in shape)


def follow(tensor: Tensor, views: Iterable[View]) -> Tensor:
    for view in views:
        tensor = view.of(tensor)
    return tensor


def ways_to_readers(graph: Graph, node: Node) -> Iterator[tuple[Node, list[View]]]:
    """For each reader of a parameter: the last of the views in a row behind it, and these views."""
    for reader in graph.users[node.name]:
        end, views, current = node, list[View](), reader
        while (view := view_of(end, current)) is not None:
            end, views = current, [*views, view]
            if len(graph.users[end.name]) != 1 or end.name in graph.outputs:
                break
            current = graph.users[end.name][0]
        yield end, views


def view_of(source: Node, reader: Node) -> View | None:
    """What a reader does to its one operand, if it only reorders axes or changes the shape."""
    if reader.inputs != (source.name,):
        return None
    if reader.op in RESHAPES:
        return View(tuple(range(len(source.shape))), reader.shape)
    order = order_of_axes(reader) if reader.op in KEPT_ORDERS else None
    return None if order is None else View(tuple(order), reader.shape)


def bias_before_views(make: Canonicaliser, node: Node) -> Ref | None:
    """view(W·x) + p is view(W·x + p'), where p has one number for each output of W and p' is p as a vector.

    The view splits the outputs into axes and reorders them; p has all these axes, and no other.
    """
    for x, p in (node.args, node.args[::-1]):
        if node.kwargs or not (isinstance(x, Ref) and isinstance(p, Ref)) or make.shape(x) != node.shape:
            continue
        views, channels = way_from_product(make, x)
        if not views or not is_reshaped_parameter(make, p):
            continue
        vector = as_vector(make, node, p, channels)
        if vector is not None:
            product = views[0].args[0]
            total = make.emit(f"{node.name}_before", ADD, (product, vector), make.shape(product), node)
            for view in views:
                args = (total, *view.args[1:])
                total = make.emit(f"{view.name}_of_{node.name}", view.operation, args, view.shape, node)
            return total
    return None


def way_from_product(make: Canonicaliser, x: Ref) -> tuple[list[Node], list[int]]:
    """A reshape of a linear map that splits its outputs, and what reorders axes behind it; and the outputs' axes."""
    views = [make.nodes[x.name]]
    while views[0].op in KEPT_ORDERS:
        views.insert(0, make.nodes[views[0].args[0].name])
    if views[0].op != "aten.reshape" or make.nodes[views[0].args[0].name].op != "linear":
        return [], []
    width, shape = make.shape(views[0].args[0])[-1], views[0].shape
    first = next((a for a in range(len(shape), -1, -1) if prod(shape[a:]) == width), len(shape))
    channels = list(range(first, len(shape)))
    for view in views[1:]:
        order = order_of_axes(view)
        if order is None:
            return [], []
        channels = [order.index(axis) for axis in channels]
    return views, channels


def is_reshaped_parameter(make: Canonicaliser, ref: Argument) -> bool:
    """Whether a value is a parameter, maybe seen in another shape or order of axes."""
    while isinstance(ref, Ref):
        node = make.nodes[ref.name]
        if node.op == "parameter":
            return axes(node.shape) > 1
        if node.op not in (*RESHAPES, *KEPT_ORDERS):
            return False
        ref = node.args[0]
    return False


def as_vector(make: Canonicaliser, node: Node, p: Ref, channels: list[int]) -> Ref | None:
    """p in the order of the outputs, as a vector; None if it has not one number for each of them."""
    own = (1,) * (len(node.shape) - len(make.shape(p))) + make.shape(p)
    wanted = [node.shape[a] if a in channels else 1 for a in range(len(node.shape))]
    if list(own) != wanted:
        return None
    present = [a for a in range(len(own)) if a in channels]
    sizes = tuple(own[a] for a in present)
    vector = make.emit(f"{node.name}_channels", RESHAPE, (p, list(sizes)), sizes, node)
    order = [present.index(a) for a in channels]
    if order != sorted(order):
        sizes = tuple(sizes[a] for a in order)
        vector = make.emit(f"{node.name}_ordered", PERMUTE, (vector, order), sizes, node)
    return make.emit(f"{node.name}_vector", RESHAPE, (vector, [prod(sizes)]), (prod(sizes),), node)
