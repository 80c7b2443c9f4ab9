"""One name for each kind of view: whatever flattens is a reshape, whatever reorders axes is a permute."""

from __future__ import annotations

from math import prod

import torch

from deadweight.graph.node import Node, Ref
from deadweight.graph.operations import EXPAND, PERMUTE, RESHAPE
from deadweight.graph.rewriting import Canonicaliser, rewrites

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@rewrites("aten.view", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as", "aten.reshape_as")
def reshape(make: Canonicaliser, node: Node) -> Ref | None:
    """Any change of shape is a reshape: copies are removed, and a view of a copy may not be a view of the original."""
    source = node.args[0]
    if node.op == "aten.view" and not isinstance(node.args[1], (list, tuple)):
        return None  # view as another dtype
    assert prod(make.shape(source)) == prod(node.shape)
    return make.emit(f"{node.name}_reshape", RESHAPE, (source, list(node.shape)), node.shape, node)


@rewrites("aten.expand_as", "aten.broadcast_to")
def expand(make: Canonicaliser, node: Node) -> Ref:
    """Broadcasting is an expand."""
    return make.emit(f"{node.name}_expand", EXPAND, (node.args[0], list(node.shape)), node.shape, node)


@rewrites("aten.unsqueeze")
def squeezed_before(make: Canonicaliser, node: Node) -> Ref | None:
    """An axis of length one that is taken away and put back: the value itself."""
    before = make.nodes[node.args[0].name]
    same = before.op == "aten.squeeze" and make.shape(before.args[0]) == node.shape
    return before.args[0] if same else None


KEPT_ORDERS = ("aten.t", "aten.transpose", "aten.permute")
REORDERS = ("movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "T", "t", "transpose", "permute")


@rewrites(*(f"aten.{name}" for name in REORDERS))
def permute(make: Canonicaliser, node: Node) -> Ref | None:
    """Any change of the order of axes is a permute; one that changes nothing or undoes another is no step."""
    order = order_of_axes(node)
    if order is None:
        return None
    if order == sorted(order):
        return node.args[0]
    before = make.nodes[node.args[0].name]
    earlier = order_of_axes(before) if before.op in KEPT_ORDERS else None
    if earlier is not None and [earlier[axis] for axis in order] == sorted(order):
        return before.args[0]
    if node.op in KEPT_ORDERS:
        return None
    return make.emit(f"{node.name}_permute", PERMUTE, (node.args[0], order), node.shape, node)


def order_of_axes(node: Node) -> list[int] | None:
    """Which axis of the operand each axis of the result is: read off a meta tensor of axes of different lengths."""
    rank = len(node.shape)
    if rank > len(PRIMES) or node.target is None:
        return None
    lengths = PRIMES[:rank]
    moved = node.target(torch.empty(lengths, device="meta"), *node.args[1:], **node.kwargs)
    return [lengths.index(n) for n in moved.shape]
