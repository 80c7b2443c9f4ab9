"""Tensors of one number: of the operand that lends them its shape they read nothing else."""

from __future__ import annotations

from deadweight.graph.node import RANDOM, Argument, Node, Ref
from deadweight.graph.operations import FULL
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites

NUMBERS = {"aten.zeros_like": 0, "aten.new_zeros": 0, "aten.ones_like": 1, "aten.new_ones": 1}


@rewrites(*NUMBERS, "aten.full_like")
def filled_like(make: Canonicaliser, node: Node) -> Ref | None:
    """zeros_like(x) is a constant of the shape of x, whatever x is.

    Where x is a constant itself nothing is gained, and its shape is kept as one that grows with x: for longer
    sequences, say.
    """
    number = argument(node, 1, "fill_value") if node.op == "aten.full_like" else NUMBERS[node.op]
    if isinstance(number, Ref) or node.dtype is None or is_constant(make, node):
        return None
    name = f"{node.name}_filled"
    args, kwargs = (list(node.shape), number), {"dtype": node.dtype}
    make.nodes[name] = Node(name, FULL.name, FULL.target, args, kwargs, node.shape, node.dtype, node.origin)
    return Ref(name)


def is_constant(make: Canonicaliser, node: Node) -> bool:
    """Whether a value depends on neither inputs nor parameters nor chance."""
    stack, seen = list(node.inputs), set[str]()
    while stack:
        before = make.nodes[stack.pop()]
        if before.op in ("input", "parameter") or before.op in RANDOM:
            return False
        stack.extend(name for name in before.inputs if name not in seen)
        seen.update(before.inputs)
    return True


def is_zeros(make: Canonicaliser, ref: Argument) -> bool:
    """Whether a value is a tensor of zeros, as the first state of a recurrence is."""
    node = make.nodes[ref.name] if isinstance(ref, Ref) else None
    return node is not None and (node.op == "aten.zeros" or (node.op == "aten.full" and node.args[1] == 0))
