"""Which values have lines that sum to one."""

from __future__ import annotations

from deadweight.graph.node import Graph, Ref


def rows_sum_to_one(graph: Graph, name: str, axis: int) -> bool:
    """Whether the value is a softmax's, seen along the axis of that softmax, whole and unchanged."""
    node = graph.nodes[name]
    rank = len(node.shape)
    axis = axis % rank
    if node.op == "softmax":
        return int(node.args[1]) % rank == axis
    if not node.args or not isinstance(node.args[0], Ref):
        return False
    before = graph.node(node.args[0])
    if node.op == "aten.repeat_interleave" and isinstance(node.args[1], Ref):
        return False  # as many copies of each as a tensor says: there may be none
    if node.op in ("aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.repeat_interleave"):
        same_end = axis == rank - 1 and bool(before.shape) and before.shape[-1] == node.shape[-1]
        return same_end and rows_sum_to_one(graph, before.name, -1)
    if node.op == "aten.transpose":
        a, b = node.args[1] % rank, node.args[2] % rank
        return rows_sum_to_one(graph, before.name, {a: b, b: a}.get(axis, axis))
    if node.op == "aten.permute":
        return rows_sum_to_one(graph, before.name, node.args[1][axis])
    return False
