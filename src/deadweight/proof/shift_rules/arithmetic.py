"""Sums, products and contractions carry a shift on; a non-linear function of one number stops it."""

from __future__ import annotations

from typing import Any

import torch

from deadweight.graph.constants import constant_value
from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Node, Ref
from deadweight.proof.labels import (
    Labels,
    compact,
    constant_along,
    fold,
    fresh,
    key,
    mix,
    plus,
    scramble,
    varying_along,
)
from deadweight.proof.operation_groups import COMPARISONS, CONVOLUTIONS, POINTWISE
from deadweight.proof.shift import MIXED, Shift, ShiftWalk, merge_sources, shift_rule, unknown_labels, with_label
from deadweight.proof.shift_rules.scores import refuse_at_softmax
from deadweight.proof.steps import Blocked, refuse_large
from deadweight.proof.stochastic import rows_sum_to_one

WHOLE = 8  # factors up to this keep 61 of a label's 64 bits, whatever powers of two they hold


@shift_rule("aten.add", "aten.sub")
def addition(walk: ShiftWalk, node: Node) -> Shift:
    """A sum is shifted by the sum of the shifts; equal shifts on both sides of a difference cancel."""
    alpha = node.kwargs.get("alpha", 1)
    labels, fixed = [], True
    source = torch.zeros((), dtype=torch.int32).expand(node.shape)
    for argument, factor in ((node.args[0], 1), (node.args[1], -alpha if node.op == "aten.sub" else alpha)):
        shift = walk.get(argument)
        if shift is not None:
            labels.append(times(shift.label, factor).expand(node.shape))
            source = merge_sources(source, shift.source.expand(node.shape))
            fixed = fixed and shift.fixed
    refuse_large(node, *(compact(label).shape for label in labels))
    return Shift(renewed(plus(node.shape, *labels)), source, fixed)


def times(label: Labels, factor: float) -> Labels:
    """An amount times a number: labels add, so a small whole number is a sum of so many."""
    if factor == 1:
        return label
    if isinstance(factor, int) and abs(factor) <= WHOLE:
        return (compact(label) * factor).expand(label.shape)
    return mix(label, key(factor))


def renewed(label: Labels) -> Labels:
    """The same labels, with a new one for each that doublings have emptied by half: 64 of them would make it 0."""
    short = compact(label)
    emptied = (short != 0) & ((short & 0xFFFFFFFF) == 0)
    return torch.where(emptied, scramble(short), short).expand(label.shape) if bool(emptied.any()) else label


@shift_rule("aten.neg")
def negation(walk: ShiftWalk, node: Node) -> Shift:
    """The opposite shift."""
    shift = walk.shifts[node.args[0].name]
    return with_label(shift, times(shift.label, -1))


@shift_rule("aten.mul")
def product(walk: ShiftWalk, node: Node) -> Shift:
    """The shift is multiplied by the factor: equal shifts times equal factors stay equal."""
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    if left is not None and right is not None:
        return both_shifted(walk, node, left, right)
    shift, factor = (left, node.args[1]) if left is not None else (right, node.args[0])
    assert shift is not None
    return scaled(walk, node, shift, factor)


@shift_rule("aten.div")
def quotient(walk: ShiftWalk, node: Node) -> Shift:
    """A shift divided by an unshifted number: equal where both are equal."""
    if walk.get(node.args[1]) is not None or node.kwargs.get("rounding_mode"):
        raise Blocked(node.name, node.op, "the divisor is shifted, or the quotient rounded")
    shift = walk.get(node.args[0])
    assert shift is not None
    return scaled(walk, node, shift, node.args[1])


def scaled(walk: ShiftWalk, node: Node, shift: Shift, factor: Any) -> Shift:
    label = shift.label.expand(node.shape)
    if not isinstance(factor, Ref):
        return with_label(shift, mix(label, key(node.op, factor)))
    label = unmasked(walk, node, label, factor)
    other = walk.identity.of(factor).expand(node.shape)
    refuse_large(node, compact(label).shape, compact(other).shape)
    return with_label(shift, mix(label, key(node.op), other), fixed=not walk.depends_on_input(factor))


def unmasked(walk: ShiftWalk, node: Node, label: Labels, factor: Ref) -> Labels:
    """The labels without those of elements of a parameter that a constant multiplies by 0."""
    of_parameter = walk.graph.depends[node.name] == (True, False)
    mask = constant_value(walk.graph, factor.name) if of_parameter and node.op == "aten.mul" else None
    if mask is None or bool((mask != 0).all()):
        return label
    if walk.graph.node(factor).op == "buffer":
        walk.outcome.conditions.add("for the mask that the module holds")
    return torch.where((mask == 0).expand(node.shape), 0, label)


def both_shifted(walk: ShiftWalk, node: Node, left: Shift, right: Shift) -> Shift:
    """(x + s)(y + t) − xy = s·y + x·t + s·t."""
    a, b = left.label.expand(node.shape), right.label.expand(node.shape)
    x, y = (walk.identity.of(arg).expand(node.shape) for arg in node.args[:2])
    refuse_large(node)
    label = mix(a, y) + mix(b, x) + mix(mix(a, 1), b)
    sources = merge_sources(left.source.expand(node.shape), right.source.expand(node.shape))
    return Shift(torch.where((a == 0) & (b == 0), 0, label), sources, False)


@shift_rule("linear")
def linear(walk: ShiftWalk, node: Node) -> Shift:
    """x ↦ W·x: rows of x with equal shifts give outputs with equal shifts."""
    x, weight = walk.get(node.args[0]), walk.get(node.args[1])
    if len(walk.graph.node(node.args[1]).shape) != 2:
        return unknown_labels(node)  # a vector: the axis that is contracted is gone
    labels, fixed = [], True
    if x is not None:
        outputs = fresh((node.shape[-1],), node.args[1].name)
        lines = fold(x.label, -1).unsqueeze(-1)
        refuse_large(node, compact(lines).shape, outputs.shape)
        labels.append(mix(lines.expand(node.shape), outputs))
        fixed = x.fixed and not walk.depends_on_input(node.args[1])
    if weight is not None:
        rows = fold(weight.label, -1)
        inputs = fold(walk.identity.of(node.args[0]), -1).unsqueeze(-1)
        refuse_large(node, compact(rows).shape, compact(inputs).shape)
        labels.append(mix(rows.expand(node.shape), inputs))
        fixed = False
    return mixed(plus(node.shape, *labels), fixed=fixed)


def mixed(label: Labels, *, fixed: bool) -> Shift:
    """A shift to which several elements of the source may have come."""
    short = compact(label)
    return Shift(label, (short != 0).to(torch.int32).mul_(MIXED).expand(label.shape), fixed)


@shift_rule(EXPERTS)
def experts(walk: ShiftWalk, node: Node) -> Shift:
    """x ↦ W[expert]·x: rows of x with equal shifts and the same expert give outputs with equal shifts."""
    x, weight = walk.get(node.args[0]), walk.get(node.args[1])
    if node.args[2] is None or walk.get(node.args[2]) is not None:
        return unknown_labels(node)
    expert, labels = walk.identity.of(node.args[2]).unsqueeze(-1), []
    if x is not None:
        outputs = fresh((node.shape[-1],), node.args[1].name)
        labels.append(mix(fold(x.label, -1).unsqueeze(-1).expand(node.shape), outputs, expert))
    if weight is not None:
        rows = fold(weight.label, node.args[3])  # experts × outputs
        alike = rows[0] if constant_along(rows, (0,)) else mix(fold(rows, 0), expert)
        inputs = fold(walk.identity.of(node.args[0]), -1).unsqueeze(-1)
        labels.append(mix(alike.expand(node.shape), inputs))
    return mixed(plus(node.shape, *labels), fixed=False)


@shift_rule(*CONVOLUTIONS)
def convolution(walk: ShiftWalk, node: Node) -> Shift:
    """Equal windows of shifts, and equal changes of the kernel, shift an output alike at every place."""
    if len(node.shape) != len(walk.graph.node(node.args[1]).shape):
        raise Blocked(node.name, node.op, "its input has no batch axis: channels stand on the first")
    if len(node.args) > 2 and node.args[2] is not None:
        raise Blocked(node.name, node.op, "its bias was not split off")
    x, weight = walk.get(node.args[0]), walk.get(node.args[1])
    if x is not None and weight is None and not transposed(node):
        return shifted_windows(walk, node, x)
    if weight is None or x is not None or transposed(node) or argument_groups(node) != 1:
        return unknown_labels(node)
    kernels = weight.label.flatten(1) if weight.label.stride(0) != 0 else weight.label[:1].flatten(1)
    per_output = fold(kernels, -1).expand(node.shape[1]).reshape(1, -1, *[1] * (len(node.shape) - 2))
    places = fresh((node.shape[0], 1, *node.shape[2:]), node.name)
    label = mix(per_output.expand(node.shape), places)
    return Shift(label, torch.full(node.shape, MIXED, dtype=torch.int32), False)


def shifted_windows(walk: ShiftWalk, node: Node, x: Shift) -> Shift:
    """Without padding, a window of one place is a linear map, and windows of equal places are equal."""
    kernel, step = walk.graph.node(node.args[1]).shape[2:], convolution_argument(node, 3, "stride", 1)
    if any(each(convolution_argument(node, 4, "padding", 0), len(kernel))):
        return unknown_labels(node)
    if all(n == 1 for n in kernel):
        steps = (slice(None, None, n) for n in each(step, len(kernel)))
        label = x.label[(slice(None), slice(None), *steps)]
    elif constant_along(x.label, tuple(range(2, x.label.ndim))):
        label = x.label[(slice(None), slice(None), *[slice(0, 1)] * len(kernel))]
    else:
        return unknown_labels(node)
    groups, places = argument_groups(node), node.shape[2:]
    lines = fold(label.unflatten(1, (groups, -1)), 2).unsqueeze(2)
    outputs = fresh((node.shape[1],), node.args[1].name).reshape(1, groups, -1, *[1] * len(places))
    refuse_large(node, compact(lines).shape, outputs.shape)
    label = mix(lines, outputs).flatten(1, 2).expand(node.shape)
    return mixed(label, fixed=x.fixed and not walk.depends_on_input(node.args[1]))


def convolution_argument(node: Node, place: int, name: str, default: int) -> Any:
    return (node.args[place] if len(node.args) > place else node.kwargs.get(name)) or default


def each(value: Any, count: int) -> list[Any]:
    """One entry for each axis; a padding in words counts as one."""
    if isinstance(value, str):
        return [value != "valid"] * count
    return list(value) * (count // len(value)) if isinstance(value, (list, tuple)) else [value] * count


def transposed(node: Node) -> bool:
    return node.op == "aten.convolution" and bool(node.args[6])


def argument_groups(node: Node) -> int:
    position = 8 if node.op == "aten.convolution" else 6
    return int(node.args[position]) if len(node.args) > position else int(node.kwargs.get("groups", 1))


@shift_rule("aten.matmul")
def matmul(walk: ShiftWalk, node: Node) -> Shift:
    """A·B: equal rows or columns of shifts give equal shifts; weights that sum to one keep a common shift."""
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    a, b = walk.graph.node(node.args[0]), walk.graph.node(node.args[1])
    if len(a.shape) < 2 or len(b.shape) < 2:
        return unknown_labels(node)
    handed_on = right is not None and left is None and rows_sum_to_one(walk.graph, a.name, -1)
    if handed_on and right is not None and constant_along(right.label, (-2,)):
        label = right.label.narrow(-2, 0, 1).expand(node.shape)
        return Shift(label, right.source.narrow(-2, 0, 1).expand(node.shape), right.fixed)
    labels, fixed = [], True
    for shift, other, axis in ((left, b, -1), (right, a, -2)):
        if shift is not None:
            suspect(walk, shift, axis)
            labels.append(contracted(walk, shift, other, axis, node))
            fixed = fixed and shift.fixed and not walk.graph.depends[other.name][1]
    if left is not None and right is not None:
        lines = fold(left.label, -1).unsqueeze(-1), fold(right.label, -2).unsqueeze(-2)
        refuse_large(node, *(compact(line).shape for line in lines))
        labels.append(mix(lines[0].expand(node.shape), lines[1]))
        fixed = False
    return mixed(plus(node.shape, *labels), fixed=fixed)


def contracted(walk: ShiftWalk, shift: Shift, other: Node, axis: int, node: Node) -> Labels:
    """Σ_r s_r·y_r: named by the line of shifts and the line of unshifted numbers that meet."""
    other_axis = -2 if axis == -1 else -1
    moved = fold(shift.label, axis).unsqueeze(axis)
    partner = walk.identity.lines(other.name, other_axis)
    if walk.graph.depends[other.name][1]:  # else a bias behind the product may take the shift over
        refuse_at_softmax(walk, node, moved, partner)
    refuse_large(node, compact(moved).shape, compact(partner).shape)
    return mix(moved.expand(node.shape), partner)


def suspect(walk: ShiftWalk, shift: Shift, axis: int) -> None:
    """Remember the source elements whose shift varies along the free axis: they are what a softmax may stumble on."""
    free = -2 if axis == -1 else -1
    if not constant_along(shift.label, (free,)):
        varying = shift.source[varying_along(shift.label, free)]
        walk.outcome.suspects.update(int(s) for s in varying.unique() if s > 0)


@shift_rule("aten.dropout", "aten.feature_dropout", "aten.native_dropout")
def dropout(walk: ShiftWalk, node: Node) -> Shift | list[Shift | None]:
    """Dropout multiplies each element by a random factor of its own."""
    shift = walk.shifts[node.args[0].name]
    shape = walk.graph.node(node.args[0]).shape
    dropped = with_label(shift, mix(shift.label, fresh(shape, node.name)), fixed=False)
    return [dropped, None] if node.op == "aten.native_dropout" else dropped  # the second result is the mask


@shift_rule(*COMPARISONS)
def comparison(walk: ShiftWalk, node: Node) -> None:
    """Numbers that are shifted equally compare as before."""
    shifts = [walk.get(argument) for argument in node.args[:2]]
    labels = [shift.label.expand(node.shape) for shift in shifts if shift is not None]
    if len(labels) != 2 or not torch.equal(*labels):
        raise stopped_by(node)


@shift_rule(*(POINTWISE - COMPARISONS))
def pointwise(walk: ShiftWalk, node: Node) -> None:
    """A non-linear function of a shifted number is another number."""
    raise stopped_by(node)


def stopped_by(node: Node) -> Blocked:
    """Why this operation stops every shift."""
    return Blocked(node.name, node.op, WHY.get(node.op, "a non-linear function of a shifted number"))


NO_MEAN = "RMSNorm subtracts no mean: nothing is ignored"
WHY = {
    "aten.tanh": "tanh (a soft-cap, say) does not ignore a shift",
    "aten.sigmoid": "a sigmoid does not ignore a shift as a softmax does",
    "aten.relu": "ReLU does not ignore a shift",
    "aten.gelu": "GELU does not ignore a shift",
    "core.rms": NO_MEAN,
    "core.unit": NO_MEAN,
    "output": "the shift reaches the output",
    "aten.pow": "a power (of a norm, say) does not ignore a shift",
}
