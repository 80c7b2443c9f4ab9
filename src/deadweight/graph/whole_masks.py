"""A mask that is true everywhere picks everything: which rows belong to the one adapter or expert that there is."""

from __future__ import annotations

from math import prod

import torch

from deadweight.graph.constants import constant_value
from deadweight.graph.experts import rows_of_a_table
from deadweight.graph.node import Argument, Node, Ref
from deadweight.graph.operations import EXPAND, RESHAPE
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites

LONG = 64  # positions: a mask that is true everywhere in a short example may not be in a longer one


@rewrites("aten.index")
def read_everywhere(make: Canonicaliser, node: Node) -> Ref | None:
    """x[mask] with a constant mask that is true everywhere is x, its masked axes made one; or rows of a table."""
    if not true_everywhere(make, node):
        return rows_of_a_table(make, node)
    return make.emit(f"{node.name}_whole", RESHAPE, (node.args[0], list(node.shape)), node.shape, node)


@rewrites("aten.index_put")
def write_everywhere(make: Canonicaliser, node: Node) -> Ref | None:
    """x[mask] = v with a constant mask that is true everywhere is v, broadcast to the shape of x."""
    values = node.args[2]
    if argument(node, 3, "accumulate", False) or not true_everywhere(make, node):
        return None
    masked = len(make.shape(node.args[1][0]))
    rows = (prod(node.shape[:masked]), *node.shape[masked:])
    if make.shape(values) != rows:
        values = make.emit(f"{node.name}_rows", EXPAND, (values, list(rows)), rows, node)
    return make.emit(f"{node.name}_whole", RESHAPE, (values, list(node.shape)), node.shape, node)


def true_everywhere(make: Canonicaliser, node: Node) -> bool:
    """Whether a value is indexed by one mask that is true everywhere, however long the example is."""
    indices: list[Argument] = list(node.args[1])
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, Ref) or mask.name not in make.old.nodes:
        return False
    value = constant_value(make.old, mask.name)
    grows = constant_value(make.old, mask.name, stretch=LONG) is not None
    return value is not None and value.dtype == torch.bool and bool(value.all()) and not grows
