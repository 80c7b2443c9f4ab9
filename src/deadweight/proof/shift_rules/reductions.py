"""Softmax, norms and statistics: what is constant along their axes is ignored or handed on."""

from __future__ import annotations

import torch

from deadweight.graph.node import Node
from deadweight.graph.rewriting import argument
from deadweight.proof.labels import constant_along, fold, key, mix
from deadweight.proof.operation_groups import DISTANCES, SOFTMAXES
from deadweight.proof.shift import MIXED, Shift, ShiftWalk, shift_rule
from deadweight.proof.shift_rules.scores import softmax_reason
from deadweight.proof.steps import Blocked


@shift_rule(*SOFTMAXES)
def softmax(walk: ShiftWalk, node: Node) -> None:
    """Softmax ignores what is constant along its axis."""
    shift = walk.shifts[node.args[0].name]
    if shift.label.shape[node.args[1]] == 1:
        raise Blocked(node.name, node.op, "the example gives it one number to compare: a longer one could tell")
    if not constant_along(shift.label, (node.args[1],)):
        raise Blocked(node.name, node.op, softmax_reason(walk))


@shift_rule("core.layer")
def layer_core(walk: ShiftWalk, node: Node) -> None:
    """LayerNorm ignores what is constant along its axes."""
    shift = walk.shifts[node.args[0].name]
    if not constant_along(shift.label, tuple(range(-node.args[1], 0))):
        walk.outcome.lines = shift.source if node.args[1] == 1 else None
        raise Blocked(node.name, node.op, "LayerNorm ignores only what is constant along its axis")


@shift_rule("core.instance")
def instance_core(walk: ShiftWalk, node: Node) -> None:
    """InstanceNorm ignores what is constant over the places of a channel."""
    shift = walk.shifts[node.args[0].name]
    if not constant_along(shift.label, tuple(range(2, shift.label.ndim))):
        raise Blocked(node.name, node.op, "InstanceNorm ignores only what is constant over a channel's places")


@shift_rule("core.batch")
def batch_core(walk: ShiftWalk, node: Node) -> None:
    """BatchNorm on batch statistics ignores what is constant over samples and places of a channel."""
    shift = walk.shifts[node.args[0].name]
    axes = tuple(a for a in range(shift.label.ndim) if a != 1)
    if not (shift.fixed and constant_along(shift.label, axes)):
        raise Blocked(node.name, node.op, "BatchNorm ignores only what is the same for all samples and places")


@shift_rule("core.group")
def group_core(walk: ShiftWalk, node: Node) -> None:
    """GroupNorm ignores what is constant over a group of channels and its places."""
    shift = walk.shifts[node.args[0].name]
    grouped = shift.label.reshape(shift.label.shape[0], node.args[1], -1)
    if not constant_along(grouped, (-1,)):
        raise Blocked(node.name, node.op, "GroupNorm ignores only what is constant over each group")


@shift_rule("core.rms", "core.unit")
def rms_core(walk: ShiftWalk, node: Node) -> None:
    """RMSNorm subtracts no mean, so it ignores no shift."""
    raise Blocked(node.name, node.op, "RMSNorm subtracts no mean: nothing is ignored")


def reduction_axes(node: Node, rank: int) -> tuple[int, ...]:
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    axes = range(rank) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    return tuple(a % rank for a in axes)


@shift_rule("aten.mean", "aten.amax", "aten.amin", "aten.logsumexp")
def mean(walk: ShiftWalk, node: Node) -> Shift:
    """The mean, maximum or log-sum-exp of equally shifted numbers is shifted as they are."""
    shift = walk.shifts[node.args[0].name]
    axes = reduction_axes(node, shift.label.ndim)
    if constant_along(shift.label, axes):
        label = shift.label.amin(axes, keepdim=False).reshape(node.shape)
        return Shift(label, shift.source.amin(axes).reshape(node.shape), shift.fixed)
    if node.op != "aten.mean":
        raise Blocked(node.name, node.op, "the numbers it compares are shifted differently")
    return folded(node, shift, axes)


@shift_rule("aten.max", "aten.min")
def extreme(walk: ShiftWalk, node: Node) -> list[Shift | None]:
    """The largest of equally shifted numbers along an axis is shifted as they are, and stands where it stood."""
    shift = walk.get(node.args[0])
    axis = argument(node, 1, "dim")
    if shift is None or isinstance(axis, bool) or not isinstance(axis, int) or not constant_along(shift.label, (axis,)):
        raise Blocked(node.name, node.op, "the numbers it compares are shifted differently")
    keep = bool(argument(node, 2, "keepdim", False))
    return [Shift(shift.label.amin(axis, keep), shift.source.amin(axis, keep), shift.fixed), None]


@shift_rule("aten.diff")
def differences(walk: ShiftWalk, node: Node) -> None:
    """Neighbours that are shifted equally differ as before."""
    shift = walk.get(node.args[0])
    if shift is None or len(node.inputs) != 1 or not constant_along(shift.label, (argument(node, 2, "dim", -1),)):
        raise Blocked(node.name, node.op, "neighbours are shifted differently")


@shift_rule("aten.sum")
def total(walk: ShiftWalk, node: Node) -> Shift:
    """A sum is shifted by the sum of the shifts: equal lines give equal sums."""
    shift = walk.shifts[node.args[0].name]
    return folded(node, shift, reduction_axes(node, shift.label.ndim))


def folded(node: Node, shift: Shift, axes: tuple[int, ...]) -> Shift:
    label = shift.label
    for axis in sorted(axes, reverse=True):
        label = fold(label, axis)
    label = mix(label.reshape(node.shape), key(node.op))
    return Shift(label, torch.where(label == 0, 0, torch.full((), MIXED, dtype=torch.int32)), shift.fixed)


@shift_rule("aten.var", "aten.std", "aten.var_mean")
def variance(walk: ShiftWalk, node: Node) -> None:
    """Variance ignores a common shift."""
    shift = walk.shifts[node.args[0].name]
    if node.op == "aten.var_mean" or not constant_along(shift.label, reduction_axes(node, shift.label.ndim)):
        raise Blocked(node.name, node.op, "variance ignores only what is constant along its axes")


@shift_rule(*DISTANCES)
def distance(walk: ShiftWalk, node: Node) -> None:
    """Distances ignore a shift that all vectors on both sides share."""
    shifts = [walk.get(argument) for argument in node.args[:2]]
    lines = [shift.label.reshape(-1, shift.label.shape[-1]) for shift in shifts if shift is not None]
    alike = len(lines) == 2 and lines[0].shape[-1] == lines[1].shape[-1]
    if not alike or any(not torch.equal(line, lines[0][:1].expand_as(line)) for line in lines):
        raise Blocked(node.name, node.op, "the vectors on the two sides are shifted differently")
