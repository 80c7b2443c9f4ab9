"""Views under one name each: what only flattens is a reshape, what only reorders axes a permute."""

from __future__ import annotations

from math import prod

import torch

from deadweight.graph.node import Node, Ref
from deadweight.graph.rewriting import Canonicaliser, rewrites

aten = torch.ops.aten
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@rewrites("aten.view", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as", "aten.reshape_as")
def reshape(make: Canonicaliser, node: Node) -> Ref | None:
    """A view of a copy may not be a view of the original: reshape says the same of both."""
    source = node.args[0]
    if node.op == "aten.view" and not isinstance(node.args[1], (list, tuple)):
        return None  # view as another dtype
    assert prod(make.shape(source)) == prod(node.shape)
    target, args = aten.reshape.default, (source, list(node.shape))
    return make.emit(f"{node.name}_reshape", "aten.reshape", target, args, node.shape, node)


@rewrites("aten.expand_as", "aten.broadcast_to")
def expand(make: Canonicaliser, node: Node) -> Ref:
    """Repeated along some axes."""
    target, args = aten.expand.default, (node.args[0], list(node.shape))
    return make.emit(f"{node.name}_expand", "aten.expand", target, args, node.shape, node)


REORDERS = ("movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "T", "t", "transpose", "permute")


@rewrites(*(f"aten.{name}" for name in REORDERS))
def permute(make: Canonicaliser, node: Node) -> Ref | None:
    """Axes in another order, read off a tensor whose axes have different lengths; in the same order: the value itself.

    So whatever reorders two axes is known to swap them.
    """
    rank = len(node.shape)
    if rank > len(PRIMES) or node.target is None:
        return None
    lengths = PRIMES[:rank]
    moved = node.target(torch.empty(lengths, device="meta"), *node.args[1:], **node.kwargs)
    order = [lengths.index(n) for n in moved.shape]
    if order == list(range(rank)):
        return node.args[0]
    if node.op in ("aten.t", "aten.transpose", "aten.permute"):
        return None
    args = (node.args[0], order)
    return make.emit(f"{node.name}_permute", "aten.permute", aten.permute.default, args, node.shape, node)
