"""The effect of a constant shift, propagated through the graph with the real weights.

A shift proof shows that every value is shifted by the same amount for all inputs. So one run with any inputs gives the
amounts, and only the weights on the path are needed. Attention weights may be any that sum to one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from deadweight.claims.shift_claim import ShiftClaim
from deadweight.errors import DeadweightError
from deadweight.graph.node import Graph, Node, Ref, Value, float64_arguments, substitute
from deadweight.proof.operation_groups import CONVOLUTIONS, SHAPE

Lookup = Callable[[str], Tensor]  # the value of a parameter or stored buffer, by its node
IDENTITY = {"aten.dropout", "aten.alias", "aten.contiguous", "aten.clone", "aten.to", "aten._to_copy", "aten.detach"}


class NotFollowed(DeadweightError):
    """The shift reaches an operation that cannot be computed without the inputs."""


def effect(graph: Graph, claim: ShiftClaim, start: str, shift: Tensor, parameter: Lookup) -> dict[str, Tensor]:
    """The shift of the value at each absorber's node, if the value at `start` is shifted by `shift`."""
    ends = {s.node for s in claim.steps if s.value is None}
    absorbing = {a.node for a in claim.absorbers}
    known = StaticValues(graph, parameter)
    moved: dict[str, Value] = {start: shift}
    result: dict[str, Tensor] = {}
    for node in graph.nodes.values():
        if node.name == start or not any(name in moved for name in node.inputs):
            continue
        if node.name in ends and node.name not in absorbing:
            continue
        moved[node.name] = push(graph, node, moved, known)
        if node.name in absorbing:
            result[node.name] = moved.pop(node.name)
    return result


class StaticValues:
    """Values that depend on parameters and constants alone, computed when they are used."""

    def __init__(self, graph: Graph, parameter: Lookup) -> None:
        self.graph, self.parameter = graph, parameter
        self.values: dict[str, Value] = {}

    def of(self, name: str) -> Value:
        if name not in self.values:
            self.values[name] = self.compute(self.graph.nodes[name])
        return self.values[name]

    def compute(self, node: Node) -> Value:
        if node.name in self.graph.parameters or node.name in self.graph.buffers:
            return self.parameter(node.name)
        if node.op == "buffer":
            tensor = self.graph.tensors[node.name]
            return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
        if node.op == "input" or self.graph.depends[node.name][1] or node.target is None:
            raise NotFollowed(f"{node.name} [{node.op}] depends on the inputs")
        args = float64_arguments(substitute(node.args, self.of))
        return node.target(*args, **float64_arguments(substitute(node.kwargs, self.of)))


def push(graph: Graph, node: Node, moved: dict[str, Value], known: StaticValues) -> Value:
    """The shift of an operation's result."""
    changed = [r for r in node.args if isinstance(r, Ref) and r.name in moved]
    if node.op in ("aten.add", "aten.sub"):
        return add_shifts(node, moved)
    if node.op in SHAPE:
        return reshape_shifts(graph, node, moved, known)
    if node.op in IDENTITY:
        return moved[changed[0].name]
    if node.op == "aten.neg":
        return -moved[changed[0].name]
    if len(changed) != 1:
        raise NotFollowed(f"{node.name} [{node.op}] reads the shift twice")
    shift, place = moved[changed[0].name], next(i for i, a in enumerate(node.args) if a is changed[0])
    other = node.args[1 - place] if len(node.args) > 1 and place < 2 else None
    if node.op == "aten.mul":
        return shift * (known.of(other.name) if isinstance(other, Ref) else other)
    if node.op == "aten.div" and place == 0 and not node.kwargs:
        return shift / (known.of(other.name) if isinstance(other, Ref) else other)
    if node.op == "linear" and place == 0:
        return linear(shift, known.of(node.args[1].name))
    if node.op in CONVOLUTIONS and place == 0 and node.target is not None:
        return node.target(shift, known.of(node.args[1].name), None, *node.args[3:], **node.kwargs)
    if node.op == "aten.matmul" and place == 1:
        return torch.matmul(any_average(graph.nodes[node.args[0].name], shift), shift)
    if node.op in ("aten.mean", "aten.sum") and node.target is not None:
        return node.target(shift, *node.args[1:], **float64_arguments(node.kwargs))
    raise NotFollowed(f"there is no rule for the shift of the result of {node.op}")


def add_shifts(node: Node, moved: dict[str, Value]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for place, ref in enumerate(node.args):
        if isinstance(ref, Ref) and ref.name in moved:
            sign = -1.0 if node.op == "aten.sub" and place == 1 else 1.0
            device = moved[ref.name].device
            total = total.to(device) + sign * moved[ref.name] * (float(node.kwargs.get("alpha", 1)) if place else 1.0)
    return total.expand(node.shape)


def reshape_shifts(graph: Graph, node: Node, moved: dict[str, Value], known: StaticValues) -> Value:
    if node.op == "getitem":
        return moved[node.args[0].name][node.args[1]]
    device = next(_leaf(moved[n]).device for n in node.inputs if n in moved)

    def value(name: str) -> Value:
        if name in moved:
            return moved[name]
        operand = graph.nodes[name]
        if operand.is_float:
            return torch.zeros(operand.shape, dtype=torch.float64, device=device)
        if graph.depends[name][1]:  # an index that depends on the inputs picks whole vectors, all with the same shift
            return torch.zeros(operand.shape, dtype=torch.int64, device=device)
        return known.of(name).to(device)

    assert node.target is not None
    return node.target(*substitute(node.args, value), **node.kwargs)


def _leaf(value: Value) -> Tensor:
    return value[0] if isinstance(value, (list, tuple)) else value


def any_average(node: Node, like: Tensor) -> Tensor:
    """Weights that sum to one along their last axis."""
    return torch.full(node.shape, 1.0 / node.shape[-1], dtype=torch.float64, device=like.device)
