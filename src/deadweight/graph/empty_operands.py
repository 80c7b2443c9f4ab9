"""Concatenation with empty tensors, as with a cache that is empty at first."""

from __future__ import annotations

from deadweight.graph.node import Node, Ref
from deadweight.graph.operations import CAT
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites


@rewrites("aten.cat")
def drop_empty(make: Canonicaliser, node: Node) -> Ref | None:
    """An empty operand adds nothing; torch.cat takes one of shape (0,) beside operands of any shape."""
    operands, axis = list(node.args[0]), int(argument(node, 1, "dim", 0))
    kept = [ref for ref in operands if 0 not in make.shape(ref)]
    if not kept or len(kept) == len(operands) or any(make.nodes[ref.name].dtype != node.dtype for ref in kept):
        return None
    return kept[0] if len(kept) == 1 else make.emit(f"{node.name}_kept", CAT, (kept, axis), node.shape, node)
