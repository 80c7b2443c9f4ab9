"""Derivatives along a motion of parameters, operation by operation.

An operation that is linear in the one operand that moves has itself as its derivative: it is run on the motion. What
the motion repeats (a bias is the same at every position) stays repeated, so most of them cost next to nothing. Every
other operation is derived by torch, in forward mode.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from deadweight.graph.evaluate import Values, value_of
from deadweight.graph.node import Graph, Node, Ref, Value
from deadweight.proof.labels import compact
from deadweight.proof.operation_groups import CONVOLUTIONS, SHAPE

LINEAR_IN_FIRST = (SHAPE - {"getitem", "aten.cat", "aten.stack"}) | {"aten.neg", "aten.div", "aten.sum", "aten.mean"}
BILINEAR = {"aten.mul", "aten.matmul", "linear", *CONVOLUTIONS}


def derivative(graph: Graph, node: Node, moved: Values, still: Values) -> Value:
    """How a node's value moves, where its operands move as `moved` says; one motion for each of several results."""
    if node.op == "getitem":
        return moved[node.args[0].name][node.args[1]]
    places = [place for place, a in enumerate(node.args) if isinstance(a, Ref) and a.name in moved]
    if node.op in ("aten.add", "aten.sub"):
        return added(node, moved)
    if node.op in ("aten.cat", "aten.stack"):
        zero = torch.zeros((), dtype=torch.float64)
        beside = {n: moved.get(n, zero.expand(graph.nodes[n].shape)) for n in node.inputs}
        return value_of(graph, node, Overlaid(beside, still), {}, {})
    linear = (node.op in BILINEAR and len(places) == 1) or (node.op in LINEAR_IN_FIRST and places == [0])
    if linear and not rounded(node):
        return run_on_motion(graph, node, moved, still)
    return forward_mode(graph, node, moved, still)


def rounded(node: Node) -> bool:
    return bool(node.kwargs.get("rounding_mode"))


def added(node: Node, moved: Values) -> Tensor:
    """The sum of the motions of both operands."""
    factor = node.kwargs.get("alpha", 1) * (-1 if node.op == "aten.sub" else 1)
    total = torch.zeros((1,) * len(node.shape), dtype=torch.float64)
    for argument, times in zip(node.args, (1, factor), strict=False):
        if isinstance(argument, Ref) and argument.name in moved:
            total = total + times * compact(moved[argument.name])
    return total.expand(node.shape)


def run_on_motion(graph: Graph, node: Node, moved: Values, still: Values) -> Value:
    """The operation itself, on the motion in place of the operand that moves."""
    name = next(n for n in node.inputs if n in moved)
    motion = moved[name]
    if node.op == "linear" and node.args[0] == Ref(name):
        motion = shortened_rows(motion)
    moving = value_of(graph, node, Overlaid({name: motion}, still), {}, {})
    return moving.expand(node.shape) if isinstance(moving, Tensor) else moving


def shortened_rows(motion: Tensor) -> Tensor:
    """The same vectors along the last axis; repeated ones once."""
    return compact(motion).expand(*compact(motion).shape[:-1], motion.shape[-1])


def forward_mode(graph: Graph, node: Node, moved: Values, still: Values) -> Value:
    """The derivative by torch's forward mode; None where the result does not move."""
    with forward_ad.dual_level():
        dual = {name: paired(still[name], moved[name]) for name in node.inputs if name in moved}
        value = value_of(graph, node, Overlaid(dual, still), {}, {})
        if isinstance(value, Tensor):
            return forward_ad.unpack_dual(value).tangent
        return [forward_ad.unpack_dual(v).tangent if isinstance(v, Tensor) else None for v in value]


def paired(value: Value, motion: Value) -> Value:
    """A value with its motion; of several results each with its own."""
    if isinstance(value, Tensor):
        return forward_ad.make_dual(value.to(torch.float64).contiguous(), motion.contiguous())
    return [v if m is None else paired(v, m) for v, m in zip(value, motion, strict=True)]


class Overlaid(dict):
    """Moved values where there are any, else those that stay."""

    def __init__(self, moved: Values, still: Values) -> None:
        super().__init__()
        self.moved, self.still = moved, still

    def __getitem__(self, name: str) -> Value:
        return self.moved[name] if name in self.moved else self.still[name]
