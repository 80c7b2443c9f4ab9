"""A weight with one matrix for each head: the map to all heads, or from all of them, as one linear map."""

from __future__ import annotations

from deadweight.graph.node import Node, Ref
from deadweight.graph.operations import LINEAR, MATMUL, PERMUTE, RESHAPE, TRANSPOSE
from deadweight.graph.rewriting import Canonicaliser, rewrites
from deadweight.graph.views import permute


def is_stored(make: Canonicaliser, ref: Ref) -> bool:
    """Whether a value is a parameter of two axes or more, perhaps seen otherwise."""
    node = make.nodes[ref.name]
    while node.op in ("aten.permute", "aten.transpose", "aten.reshape", "aten.unsqueeze", "aten.squeeze"):
        node = make.nodes[node.args[0].name]
    return node.op == "parameter" and node.is_float and sum(n > 1 for n in node.shape) > 1


def reordered(make: Canonicaliser, node: Node, ref: Ref, order: list[int], shape: list[int]) -> Ref:
    """A parameter with its axes in this order, and then in this shape."""
    if order != sorted(order):
        turned = tuple(make.shape(ref)[a] for a in order)
        ref = make.emit(f"{node.name}_turned", PERMUTE, (ref, order), turned, node)
        ref = permute(make, make.nodes[ref.name]) or ref
    return make.emit(f"{node.name}_flat", RESHAPE, (ref, shape), tuple(shape), node)


def heads_at_once(make: Canonicaliser, node: Node) -> Ref | None:
    """x[:, None] @ W with one matrix for each head that all read the same x: one linear map, split by heads."""
    x, weight = node.args[:2]
    before, matrices = make.shape(x), make.shape(weight)
    if len(matrices) != 3 or not is_stored(make, weight) or len(node.shape) < 3 or matrices[0] == 1:
        return None
    if len(before) > 2 and before[-3] != 1:
        return None
    heads, inner, outer = matrices
    shared = make.emit(
        f"{node.name}_shared", RESHAPE, (x, [*before[:-3], *before[-2:]]), (*before[:-3], *before[-2:]), node
    )
    whole = linear(make, node, shared, reordered(make, node, weight, [1, 0, 2], [inner, heads * outer]))
    split = (*before[:-3], before[-2], heads, outer)
    value = make.emit(f"{node.name}_split", RESHAPE, (whole, list(split)), split, node)
    lead = len(before[:-3])
    order = [*range(lead), lead + 1, lead, lead + 2]
    return make.emit(f"{node.name}_by_head", PERMUTE, (value, order), node.shape, node)


def linear(make: Canonicaliser, node: Node, x: Ref, matrix: Ref) -> Ref:
    """x·M for a matrix M."""
    turned = make.emit(f"{node.name}_matrix", TRANSPOSE, (matrix,), make.shape(matrix)[::-1], node)
    shape = (*make.shape(x)[:-1], make.shape(matrix)[-1])
    return make.emit(f"{node.name}_linear", LINEAR, (x, turned), shape, node)


@rewrites("aten.sum")
def sum_over_heads(make: Canonicaliser, node: Node) -> Ref | None:
    """Σ_h x_h·W_h: one linear map of the heads side by side."""
    product = make.nodes[node.args[0].name]
    axes = node.args[1] if len(node.args) > 1 else None
    if product.op != MATMUL.name or node.kwargs or not isinstance(axes, (list, tuple)) or len(node.args) > 2:
        return None
    x, weight = product.args
    rank = len(product.shape)
    if rank < 3 or [a % rank for a in axes] != [rank - 3] or len(make.shape(weight)) != 3:
        return None
    if not is_stored(make, weight) or len(make.shape(x)) != rank or make.shape(x)[-3] != make.shape(weight)[0]:
        return None
    heads, inner, outer = make.shape(weight)
    order = [*range(rank - 3), rank - 2, rank - 3, rank - 1]
    turned = tuple(make.shape(x)[a] for a in order)
    value = make.emit(f"{node.name}_beside", PERMUTE, (x, order), turned, node)
    value = permute(make, make.nodes[value.name]) or value
    joined = (*turned[:-2], heads * inner)
    value = make.emit(f"{node.name}_joined", RESHAPE, (value, list(joined)), joined, node)
    flat = make.emit(f"{node.name}_flat", RESHAPE, (weight, [heads * inner, outer]), (heads * inner, outer), node)
    return linear(make, node, value, flat)
