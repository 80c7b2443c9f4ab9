"""How a shift passes each operation. The first line of a rule is its theorem; an operation without a rule blocks."""

from __future__ import annotations

from typing import Any

import torch

from deadweight.graph.constants import known_indices
from deadweight.graph.node import Node, Ref, substitute
from deadweight.proof.labels import Labels, constant_along, fold, fresh, key, mix, varying_along
from deadweight.proof.opsets import CONVOLUTIONS, MINUS_INFINITY, POINTWISE, SHAPE
from deadweight.proof.shift import MIXED, Shift, ShiftWalk, merge_sources, shift_rule, with_label
from deadweight.proof.steps import Blocked, refuse_large
from deadweight.proof.stochastic import rows_sum_to_one

INDEXED = {"aten.index", "aten.index_select", "aten.gather", "aten.masked_select", "aten.take_along_dim"}
REARRANGES_UNKNOWN = {"aten.cumsum", "aten.index_put", "aten.scatter", "aten.scatter_add", "aten.index_add"}
REARRANGES_UNKNOWN |= {"aten.slice_scatter", "aten.select_scatter", "aten.index_copy", "aten.copy", "aten.triu"}
REARRANGES_UNKNOWN |= {"aten.tril", "aten.avg_pool1d", "aten.avg_pool2d", "aten.upsample_bilinear2d"}


def unknown_labels(node: Node, shift: Shift) -> Shift:
    """Nothing is claimed equal, nothing zero: always sound for an operation that is linear in what is shifted."""
    refuse_large(node)
    return Shift(fresh(node.shape, node.name, "moved"), torch.full(node.shape, MIXED, dtype=torch.int32), False)


@shift_rule(*(SHAPE - INDEXED))
def shape(walk: ShiftWalk, node: Node) -> Any:
    """It moves elements, and their shifts with them."""
    if node.op == "getitem":
        return walk.shifts[node.args[0].name][node.args[1]]
    run = lambda lookup: node.target(*substitute(node.args, lookup), **node.kwargs)  # type: ignore[misc]  # noqa: E731
    assert node.target is not None
    shifts = [walk.shifts[n] for n in node.inputs if n in walk.shifts]
    zero = {n: torch.zeros(walk.graph.nodes[n].shape, dtype=torch.int64) for n in node.inputs if n not in walk.shifts}
    label = run(lambda n: walk.shifts[n].label if n in walk.shifts else zero[n])
    source = run(lambda n: walk.shifts[n].source if n in walk.shifts else zero[n].to(torch.int32))
    fixed = all(s.fixed for s in shifts)
    if isinstance(label, (list, tuple)):
        return [Shift(a, b, fixed) for a, b in zip(label, source, strict=True)]
    return Shift(label, source, fixed)


@shift_rule(*INDEXED)
def index(walk: ShiftWalk, node: Node) -> Shift:
    """It picks elements: where all that it may pick are shifted equally, so is the result."""
    shift = walk.get(node.args[0])
    if shift is None:
        raise Blocked(node.name, node.op, "the index itself is shifted")
    if node.op != "aten.index" or node.target is None:
        return unknown_labels(node, shift)
    known = known_indices(walk.graph, node)
    if known is not None:
        return Shift(node.target(shift.label, known), node.target(shift.source, known), shift.fixed)
    axes = tuple(a for a, i in enumerate(node.args[1]) if i is not None)
    if not constant_along(shift.label, axes):
        return unknown_labels(node, shift)
    zeros = [None if i is None else torch.zeros(walk.graph.node(i).shape, dtype=torch.int64) for i in node.args[1]]
    label = node.target(shift.label, zeros)
    return Shift(label, node.target(shift.source, zeros), shift.fixed)


@shift_rule(*REARRANGES_UNKNOWN)
def linear_unknown(walk: ShiftWalk, node: Node) -> Shift:
    """It is linear in its argument: the result is shifted by amounts of which nothing more is known."""
    shift = next(walk.shifts[n] for n in node.inputs if n in walk.shifts)
    return unknown_labels(node, shift)


@shift_rule("aten.add", "aten.sub")
def addition(walk: ShiftWalk, node: Node) -> Shift:
    """Shifts of summands add; equal shifts of both sides of a difference cancel."""
    sign = -1 if node.op == "aten.sub" else 1
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    alpha = node.kwargs.get("alpha", 1)
    label = torch.zeros(node.shape, dtype=torch.int64)
    source = torch.zeros(node.shape, dtype=torch.int32)
    fixed = True
    for shift, factor in ((left, 1), (right, sign)):
        if shift is not None:
            own = shift.label if alpha == 1 or (factor == 1 and shift is left) else mix(shift.label, key(alpha))
            label = label + factor * own.expand(node.shape)
            source = merge_sources(source, shift.source.expand(node.shape))
            fixed = fixed and shift.fixed
    return Shift(label, source, fixed)


@shift_rule("aten.neg")
def negation(walk: ShiftWalk, node: Node) -> Shift:
    """The opposite shift."""
    shift = walk.shifts[node.args[0].name]
    return with_label(shift, -shift.label)


@shift_rule("aten.mul")
def product(walk: ShiftWalk, node: Node) -> Shift:
    """A shift times a factor: equal where shift and factor are equal."""
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
    other = walk.identity.of(factor).expand(node.shape)
    return with_label(shift, mix(label, key(node.op), other), fixed=not walk.depends_on_input(factor))


def both_shifted(walk: ShiftWalk, node: Node, left: Shift, right: Shift) -> Shift:
    """(x + s)(y + t) − xy = s·y + x·t + s·t."""
    a, b = left.label.expand(node.shape), right.label.expand(node.shape)
    x, y = (walk.identity.of(arg).expand(node.shape) for arg in node.args[:2])
    label = mix(a, y) + mix(b, x) + mix(mix(a, 1), b)
    sources = merge_sources(left.source.expand(node.shape), right.source.expand(node.shape))
    return Shift(torch.where((a == 0) & (b == 0), 0, label), sources, False)


@shift_rule("linear")
def linear(walk: ShiftWalk, node: Node) -> Shift:
    """x ↦ W·x: rows with the same shift before have the same shift after, output by output."""
    x, weight = walk.get(node.args[0]), walk.get(node.args[1])
    label = torch.zeros(node.shape, dtype=torch.int64)
    fixed = True
    if x is not None:
        outputs = fresh((node.shape[-1],), node.args[1].name)
        label = label + mix(fold(x.label, -1).unsqueeze(-1).expand(node.shape), outputs)
        fixed = x.fixed and not walk.depends_on_input(node.args[1])
    if weight is not None:
        rows = fold(weight.label, -1).expand(node.shape)
        label = label + mix(rows, fold(walk.identity.of(node.args[0]), -1).unsqueeze(-1))
        fixed = False
    source = torch.full((), MIXED, dtype=torch.int32).expand(node.shape)
    return Shift(label, torch.where(label == 0, 0, source), fixed)


@shift_rule(*CONVOLUTIONS)
def convolution(walk: ShiftWalk, node: Node) -> Shift:
    """A weight changed alike for several outputs shifts these outputs alike, at every place."""
    x, weight = walk.get(node.args[0]), walk.get(node.args[1])
    if len(node.args) > 2 and node.args[2] is not None:
        raise Blocked(node.name, node.op, "a convolution without a batch axis")
    if weight is None or x is not None:
        return unknown_labels(node, x or weight)  # type: ignore[arg-type]
    kernels = weight.label.flatten(1) if weight.label.stride(0) != 0 else weight.label[:1].flatten(1)
    per_output = fold(kernels, -1)
    if len(per_output) not in (1, node.shape[1]):
        return unknown_labels(node, weight)
    per_output = per_output.expand(node.shape[1]).reshape(1, -1, *[1] * (len(node.shape) - 2))
    places = fresh((node.shape[0], 1, *node.shape[2:]), node.name)
    label = mix(per_output.expand(node.shape), places)
    if transposed(node) or argument_groups(node) != 1:
        return unknown_labels(node, weight)
    return Shift(label, torch.full(node.shape, MIXED, dtype=torch.int32), False)


def transposed(node: Node) -> bool:
    return node.op == "aten.convolution" and bool(node.args[6])


def argument_groups(node: Node) -> int:
    position = 8 if node.op == "aten.convolution" else 6
    return int(node.args[position]) if len(node.args) > position else int(node.kwargs.get("groups", 1))


@shift_rule("aten.embedding")
def embedding(walk: ShiftWalk, node: Node) -> Shift:
    """A row of a table: where all rows are shifted alike, so is whichever row is read."""
    shift = walk.get(node.args[0])
    if shift is None:
        raise Blocked(node.name, node.op, "the index is shifted")
    if constant_along(shift.label, (0,)):
        return Shift(shift.label[0].expand(node.shape), shift.source[0].expand(node.shape), shift.fixed)
    columns = fold(shift.label, 0).expand(node.shape) if shift.label.stride(1) else fold(shift.label[:, :1], 0)
    label = mix(columns.expand(node.shape), walk.identity.of(node.args[1]).unsqueeze(-1))
    return Shift(label, torch.full(node.shape, MIXED, dtype=torch.int32), False)


@shift_rule("aten.matmul")
def matmul(walk: ShiftWalk, node: Node) -> Shift:
    """Products of equal rows and columns are shifted equally; weights that sum to one hand a common shift on."""
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    a, b = walk.graph.node(node.args[0]), walk.graph.node(node.args[1])
    if len(a.shape) < 2 or len(b.shape) < 2:
        return unknown_labels(node, left or right)  # type: ignore[arg-type]
    handed_on = right is not None and left is None and rows_sum_to_one(walk.graph, a.name, -1)
    if handed_on and right is not None and constant_along(right.label, (-2,)):
        label = right.label.narrow(-2, 0, 1).expand(node.shape)
        return Shift(label, right.source.narrow(-2, 0, 1).expand(node.shape), right.fixed)
    label, fixed = torch.zeros(node.shape, dtype=torch.int64), True
    for shift, other, axis, _name in ((left, b, -1, a), (right, a, -2, b)):
        if shift is not None:
            label = label + contracted(walk, shift, other, axis, node.shape)
            fixed = fixed and shift.fixed and not walk.graph.depends[other.name][1]
            suspect(walk, shift, axis)
    if left is not None and right is not None:
        cross = mix(fold(left.label, -1).unsqueeze(-1).expand(node.shape), fold(right.label, -2).unsqueeze(-2))
        label, fixed = label + cross, False
    source = torch.full((), MIXED, dtype=torch.int32).expand(node.shape)
    return Shift(label, torch.where(label == 0, 0, source), fixed)


def contracted(walk: ShiftWalk, shift: Shift, other: Node, axis: int, out: tuple[int, ...]) -> Labels:
    """Σ_r s_r·y_r: named by the line of shifts and the line of unshifted numbers that meet."""
    other_axis = -2 if axis == -1 else -1
    moved = fold(shift.label, axis).unsqueeze(axis)
    partner = fold(walk.identity.of(other.name), other_axis).unsqueeze(other_axis)
    return mix(moved.expand(out), partner)


def suspect(walk: ShiftWalk, shift: Shift, axis: int) -> None:
    """Remember the source elements whose shift varies along the free axis: they are what a softmax may stumble on."""
    free = -2 if axis == -1 else -1
    varying = shift.source[varying_along(shift.label, free)]
    walk.outcome.suspects.update(int(s) for s in varying.unique() if s > 0)


@shift_rule("softmax", "aten.log_softmax", "aten._log_softmax")
def softmax(walk: ShiftWalk, node: Node) -> None:
    """Softmax ignores what is constant along its axis."""
    shift = walk.shifts[node.args[0].name]
    if shift.label.shape[node.args[1]] == 1:
        raise Blocked(node.name, node.op, "the example gives it one number to compare: a longer one could tell")
    if not constant_along(shift.label, (node.args[1],)):
        raise Blocked(node.name, node.op, softmax_reason(walk, node))


def softmax_reason(walk: ShiftWalk, node: Node) -> str:
    """Say what made the shift vary along the axis, where the steps tell."""
    if walk.outcome.suspects:
        return "the shift differs from key to key behind a position-dependent factor (rotary)"
    steps = walk.outcome.steps
    product = max((i for i, s in enumerate(steps) if s.op == "aten.matmul"), default=len(steps))
    if any(s.op == "aten.cat" for s in steps[product:]):
        return "a logit that is not shifted stands beside the shifted ones (attention sink)"
    return "the shift varies along the softmax axis"


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


@shift_rule("core.rms")
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


@shift_rule("aten.masked_fill", "aten.where")
def masked(walk: ShiftWalk, node: Node) -> Shift:
    """A place filled with −∞ may count as shifted by anything; any other choice must agree on both sides."""
    picks = node.args[1:] if node.op == "aten.where" else (node.args[0], node.args[2])
    mask = node.args[0] if node.op == "aten.where" else node.args[1]
    if walk.get(mask) is not None:
        raise Blocked(node.name, node.op, "the mask itself is shifted")
    kept = [p for p in picks if not minus_infinity(p)]
    shifts = [walk.get(p) for p in kept]
    moved = [s for s in shifts if s is not None]
    if len(kept) == 1:
        return with_label(moved[0], moved[0].label.expand(node.shape))
    zero = torch.zeros(node.shape, dtype=torch.int64)
    labels = [zero if s is None else s.label.expand(node.shape) for s in shifts]
    chosen = mix(labels[0], 1, walk.identity.of(mask)) + mix(labels[1], 2, walk.identity.of(mask))
    label = torch.where(labels[0] == labels[1], labels[0], chosen)
    fixed = all(s.fixed for s in moved) and not walk.depends_on_input(mask)
    return Shift(label, torch.full(node.shape, MIXED, dtype=torch.int32), fixed)


def minus_infinity(value: Any) -> bool:
    return isinstance(value, (int, float)) and value <= MINUS_INFINITY


@shift_rule("aten.dropout")
def dropout(walk: ShiftWalk, node: Node) -> Shift:
    """Dropout multiplies each element by a random factor of its own."""
    shift = walk.shifts[node.args[0].name]
    return with_label(shift, mix(shift.label, fresh(node.shape, node.name)), fixed=False)


@shift_rule("aten.topk", "aten.sort")
def ranking(walk: ShiftWalk, node: Node) -> list[Shift | None]:
    """A common shift keeps the order: the values carry it, the places do not change."""
    shift = walk.shifts[node.args[0].name]
    place = 2 if node.op == "aten.topk" else 1
    axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
    if isinstance(axis, bool):
        raise Blocked(node.name, node.op, "an unusual way to sort")
    if not constant_along(shift.label, (axis,)):
        raise Blocked(node.name, node.op, "the numbers it ranks are shifted differently")
    count = node.args[1] if node.op == "aten.topk" else shift.label.shape[axis]
    label, source = (x.narrow(axis, 0, 1).expand(*resized(x.shape, axis, count)) for x in (shift.label, shift.source))
    return [Shift(label, source, shift.fixed), None]


def resized(shape: torch.Size, axis: int, count: int) -> list[int]:
    sizes = list(shape)
    sizes[axis] = count
    return sizes


@shift_rule("aten.constant_pad_nd", "aten.pad")
def padding(walk: ShiftWalk, node: Node) -> Shift:
    """Padding adds unshifted elements."""
    assert node.target is not None
    shift = walk.shifts[node.args[0].name]
    if (node.args[2] if len(node.args) > 2 and node.op == "aten.pad" else "constant") != "constant":
        return unknown_labels(node, shift)
    if node.kwargs.get("mode", "constant") != "constant":
        return unknown_labels(node, shift)
    return Shift(node.target(shift.label, node.args[1]), node.target(shift.source, node.args[1]), shift.fixed)


@shift_rule(*POINTWISE)
def pointwise(walk: ShiftWalk, node: Node) -> None:
    """A non-linear function of a shifted number is another number."""
    raise Blocked(node.name, node.op, WHY.get(node.op, "a non-linear function of a shifted number"))


WHY = {
    "aten.tanh": "tanh (a soft-cap, say) does not ignore a shift",
    "aten.sigmoid": "a sigmoid does not ignore a shift as a softmax does",
    "aten.relu": "ReLU does not ignore a shift",
    "aten.gelu": "GELU does not ignore a shift",
    "aten.pow": "a power (of a norm, say) does not ignore a shift",
}
