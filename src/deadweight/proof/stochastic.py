"""Which values have lines that sum to one."""

from __future__ import annotations

import math

import torch

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Graph, Node, Ref
from deadweight.graph.operations import SAFE_SOFTMAX


def rows_sum_to_one(graph: Graph, name: str, axis: int) -> bool:
    """Whether the value is a softmax's, seen along the axis of that softmax, whole and unchanged."""
    node = graph.nodes[name]
    rank = len(node.shape)
    axis = axis % rank
    if node.op == "softmax":
        return int(node.args[1]) % rank == axis and not hides_a_line(graph, node)
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


def hides_a_line(graph: Graph, node: Node) -> bool:
    """Whether a softmax that answers a line of −∞ with zeros meets one, by a mask that is a constant.

    Where data decides on the mask, claims are about data that leaves something to see in every line.
    """
    scores, axis = graph.node(node.args[0]), int(node.args[1])
    if node.target is not SAFE_SOFTMAX.target or scores.op not in ("aten.masked_fill", "aten.add"):
        return False
    mask = constant_value(graph, scores.inputs[-1])
    if mask is None:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == -math.inf
    return bool(hidden.expand(scores.shape).all(axis).any())
