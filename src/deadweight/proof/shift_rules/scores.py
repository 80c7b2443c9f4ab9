"""Scores of all queries and keys: where a softmax stops a shift, seen before a label is written for every pair."""

from __future__ import annotations

import math

import torch

from deadweight.graph.node import Node
from deadweight.proof.identity_labels import LARGE
from deadweight.proof.labels import Labels, compact
from deadweight.proof.operation_groups import SOFTMAXES
from deadweight.proof.shift import ShiftWalk
from deadweight.proof.steps import Blocked


def refuse_at_softmax(walk: ShiftWalk, node: Node, moved: Labels, partner: Labels) -> None:
    """Stop before the labels of all pairs are written, where a softmax over one of them stops the shift anyway.

    The label of a pair is a hash of two labels. If that of the last axis varies, so does the label, and multiples and
    sums with what is not shifted keep that.
    """
    last = moved if moved.shape[-1] > 1 else partner
    if math.prod(torch.broadcast_shapes(compact(moved).shape, compact(partner).shape)) <= LARGE:
        return
    varies = (last != last[..., :1]).any(-1, keepdim=True) & (moved != 0).any(-1, keepdim=True)
    end = softmax_behind(walk, node)
    if end is not None and bool(varies.any()):
        raise Blocked(end.name, end.op, softmax_reason(walk))


def softmax_behind(walk: ShiftWalk, node: Node) -> Node | None:
    """The softmax over the last axis that alone reads a value, behind multiples of it and sums with what is fixed."""
    while len(walk.graph.users[node.name]) == 1 and node.name not in walk.graph.outputs:
        reader, before = walk.graph.users[node.name][0], node.name
        if reader.op in SOFTMAXES:
            return reader if reader.args[1] % len(reader.shape) == len(reader.shape) - 1 else None
        others = [name for name in reader.inputs if name != before]
        number = reader.op in ("aten.mul", "aten.div") and not others
        total = reader.op in ("aten.add", "aten.sub") and not any(is_behind(walk, name) for name in others)
        if not (number or total):
            return None
        node = reader
    return None


def is_behind(walk: ShiftWalk, name: str) -> bool:
    """Whether a value depends on one of the walk's sources."""
    stack, seen = [name], set[str]()
    while stack:
        name = stack.pop()
        if name in walk.sources:
            return True
        if name not in seen:
            seen.add(name)
            stack.extend(walk.graph.nodes[name].inputs)
    return False


def softmax_reason(walk: ShiftWalk) -> str:
    """Say what made the shift vary along the axis of a softmax, where the steps tell."""
    steps = walk.outcome.steps
    product = max((i for i, s in enumerate(steps) if s.op == "aten.matmul"), default=len(steps))
    before = {s.op for s in steps[:product]}
    if walk.outcome.suspects and "aten.cat" in before and not {"aten.mul", "aten.sub"} & before:
        return "a key that is not shifted stands beside the shifted ones (add_bias_kv, add_zero_attn, memory keys)"
    if walk.outcome.suspects:
        return "the shift differs from key to key behind a position-dependent factor (rotary)"
    if any(s.op == "aten.cat" for s in steps[product:]):
        return "a logit that is not shifted stands beside the shifted ones (attention sink)"
    return "the shift varies along the softmax axis"
