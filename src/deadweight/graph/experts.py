"""Experts stored as one three-dimensional parameter: one linear map per expert, in one operation.

`experts(x, W, index, axis)` multiplies each row of x by the matrix of its expert. `index` gives the expert of each row;
without an index, it is the row's position along the first axis of x. `axis` is the axis of W along which x is
contracted; the other one is the output's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadweight.graph.node import Node, Operation, Ref
from deadweight.graph.operations import EMBEDDING, EXPAND
from deadweight.graph.rewriting import Canonicaliser, rewrites
from deadweight.graph.views import KEPT_ORDERS, order_of_axes

EXPERTS = "experts"


def experts(x: Tensor, weight: Tensor, index: Tensor | None, axis: int) -> Tensor:
    weight = weight if index is None else weight[index]
    weight = weight if axis == 1 else weight.transpose(1, 2)
    return torch.matmul(x, weight) if index is None else torch.matmul(x.unsqueeze(-2), weight).squeeze(-2)


BY_EXPERT = Operation(EXPERTS, experts)


def gathered_matrices(make: Canonicaliser, ref: object) -> tuple[Ref, Ref] | None:
    """The parameter and the index, if a value is W[index]: one matrix for each expert in the index."""
    node = make.nodes[ref.name] if isinstance(ref, Ref) else None
    if node is None or node.op != "aten.index" or len(node.args[1]) != 1 or not isinstance(node.args[1][0], Ref):
        return None
    weight, index = node.args[0], node.args[1][0]
    plain = make.nodes[weight.name].op == "parameter" and len(make.shape(weight)) == 3
    whole = make.nodes[index.name].dtype != torch.bool and len(make.shape(index)) == 1
    return (weight, index) if plain and whole else None


@rewrites("aten.squeeze")
def one_row_each(make: Canonicaliser, node: Node) -> Ref | None:
    """squeeze(W[index] @ x[:, :, None]) or squeeze(x[:, None] @ W[index]): one row for each expert in the index."""
    product = make.nodes[node.args[0].name]
    if product.op != "aten.matmul" or len(product.shape) != 3 or len(node.shape) != 2:
        return None
    for place, axis in ((0, 2), (1, 1)):
        matrices, row = gathered_matrices(make, product.args[place]), row_of(make, product.args[1 - place], axis)
        if matrices is not None and row is not None and product.shape[axis] == 1:
            return make.emit(f"{node.name}_experts", BY_EXPERT, (row, *matrices, axis), node.shape, node)
    return None


def row_of(make: Canonicaliser, ref: object, axis: int) -> Ref | None:
    """x, if a value is x unsqueezed at the axis that a batched matrix product expects."""
    node = make.nodes[ref.name] if isinstance(ref, Ref) else None
    if node is None or node.op != "aten.unsqueeze" or len(node.shape) != 3:
        return None
    return node.args[0] if node.args[1] % 3 == axis else None


def every_expert(make: Canonicaliser, node: Node) -> Ref | None:
    """x @ W, where W is a parameter with one matrix per expert, or the transpose of each.

    The first axis of x is that of the experts; an x of two axes is read by every expert.
    """
    x, found = node.args[:2]
    matrices = stacked_matrices(make, found)
    if not isinstance(x, Ref) or matrices is None or len(node.shape) != 3 or len(make.shape(x)) < 2:
        return None
    weight, axis = matrices
    count, shape = make.shape(weight)[0], make.shape(x)
    if len(shape) == 2 and count > 1:
        shape = (count, *shape)
        x = make.emit(f"{node.name}_rows", EXPAND, (x, list(shape)), shape, node)
    if len(shape) != 3 or shape[0] != count:
        return None
    return make.emit(f"{node.name}_experts", BY_EXPERT, (x, weight, None, axis), node.shape, node)


def stacked_matrices(make: Canonicaliser, ref: Ref) -> tuple[Ref, int] | None:
    """A parameter of three axes, and the one along which its matrices are contracted from the left."""
    node = make.nodes[ref.name]
    if len(node.shape) != 3:
        return None
    if node.op == "parameter":
        return ref, 1
    turned = node.op in KEPT_ORDERS and order_of_axes(node) == [0, 2, 1]
    return (node.args[0], 2) if turned and make.nodes[node.args[0].name].op == "parameter" else None


def rows_of_a_table(make: Canonicaliser, node: Node) -> Ref | None:
    """table[index] of a two-dimensional parameter: an embedding look-up."""
    table, indices = node.args[0], node.args[1]
    known = len(indices) == 1 and isinstance(indices[0], Ref) and make.nodes[indices[0].name].dtype != torch.bool
    if not known or make.nodes[table.name].op != "parameter" or len(make.shape(table)) != 2:
        return None
    if depends_on_nothing(make, indices[0].name):
        return None  # a constant index picks known rows: the operation stays as it is
    return make.emit(f"{node.name}_rows", EMBEDDING, (table, indices[0]), node.shape, node)


def depends_on_nothing(make: Canonicaliser, name: str) -> bool:
    return make.old.depends[name] == (False, False) if name in make.old.nodes else False
