"""Operations that move, pick, repeat or fill elements: a shift goes where its element goes."""

from __future__ import annotations

import math
from typing import Any

import torch

from deadweight.graph.constants import constant_value, known_indices
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.labels import compact, constant_along, fold, mix, plus
from deadweight.proof.operation_groups import INDEXED, LOW_FILL, MINUS_INFINITY, SHAPE
from deadweight.proof.shape_operations import move
from deadweight.proof.shift import MIXED, Shift, ShiftWalk, shift_rule, unknown_labels, with_label
from deadweight.proof.steps import Blocked, refuse_large

REARRANGES_UNKNOWN = {"aten.cumsum", "aten.index_put", "aten.scatter", "aten.scatter_add", "aten.index_add"}
REARRANGES_UNKNOWN |= {"aten.slice_scatter", "aten.select_scatter", "aten.index_copy", "aten.copy"}
REARRANGES_UNKNOWN |= {"aten.avg_pool1d", "aten.avg_pool2d", "aten.upsample_bilinear2d"}


PASS_SCORES_ON = {"aten.add", "aten.masked_fill", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.permute"}
PASS_SCORES_ON |= {"aten.transpose"}

AFFINE = (SHAPE - INDEXED) | {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.where"}
AFFINE |= {"aten.masked_fill", "aten.to", "aten._to_copy"}


@shift_rule(*(SHAPE - INDEXED))
def shape(walk: ShiftWalk, node: Node) -> Any:
    """It moves elements, and their shifts with them."""
    if node.op == "getitem":
        return walk.shifts[node.args[0].name][node.args[1]]
    shifts = [walk.shifts[n] for n in node.inputs if n in walk.shifts]
    none = torch.zeros((), dtype=torch.int64)
    zero = {n: none.expand(walk.graph.nodes[n].shape) for n in node.inputs if n not in walk.shifts}
    label = move(walk.graph, node, lambda n: walk.shifts[n].label if n in walk.shifts else zero[n])
    source = move(walk.graph, node, lambda n: walk.shifts[n].source if n in walk.shifts else zero[n].to(torch.int32))
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
    if node.op == "aten.index_select" and constant_along(shift.label, (node.args[1],)):
        label, source = (part.narrow(node.args[1], 0, 1).expand(node.shape) for part in (shift.label, shift.source))
        return Shift(label, source, shift.fixed)
    if node.op in ("aten.gather", "aten.index_select") and walk.get(node.args[2]) is None:
        return gathered(walk, node, shift)
    if node.op != "aten.index" or node.target is None:
        return unknown_labels(node)
    known = known_indices(walk.graph, node)
    if known is not None:
        return Shift(node.target(shift.label, known), node.target(shift.source, known), shift.fixed)
    axes = tuple(a for a, i in enumerate(node.args[1]) if i is not None)
    if not constant_along(shift.label, axes):
        return unknown_labels(node)
    if any(i is not None and walk.graph.node(i).dtype == torch.bool for i in node.args[1]):
        raise Blocked(node.name, node.op, "data decides how many elements it picks")
    zeros = [None if i is None else torch.zeros(walk.graph.node(i).shape, dtype=torch.int64) for i in node.args[1]]
    label = node.target(shift.label, zeros)
    return Shift(label, node.target(shift.source, zeros), shift.fixed)


def gathered(walk: ShiftWalk, node: Node, shift: Shift) -> Shift:
    """Equal numbers pick equal shifts from lines that are shifted equally, place by place.

    A line runs along the axis that is picked from: tokens that are dropped or put back in order, all channels alike.
    """
    axis, shape = node.args[1] % len(node.shape), node.shape
    label, source = shift.label, shift.source
    for other in range(len(shape)):  # an index may be shorter than the value along the other axes
        if other != axis and label.shape[other] != shape[other]:
            label, source = (part.narrow(other, 0, shape[other]) for part in (label, source))
    if constant_along(label, (axis,)):
        label, source = (part.narrow(axis, 0, 1).expand(shape) for part in (label, source))
        return Shift(label, source, shift.fixed)
    lines, picks = fold(label, axis).unsqueeze(axis), walk.identity.of(node.args[2])
    if node.op == "aten.index_select":
        picks = picks.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    refuse_large(node, compact(lines).shape, compact(picks).shape)
    label = mix(lines.expand(shape), picks.expand(shape))
    return Shift(label, torch.full((), MIXED, dtype=torch.int32).expand(shape), False)


@shift_rule(*REARRANGES_UNKNOWN)
def linear_unknown(walk: ShiftWalk, node: Node) -> Shift:
    """It is linear in its argument: the result is shifted by amounts of which nothing more is known."""
    return unknown_labels(node)


@shift_rule("aten.triu", "aten.tril")
def triangle(walk: ShiftWalk, node: Node) -> Shift:
    """What it leaves out is 0 whatever was there; the rest is shifted as before."""
    assert node.target is not None
    shift = walk.shifts[node.args[0].name]
    label, source = (node.target(part, *node.args[1:], **node.kwargs) for part in (shift.label, shift.source))
    return Shift(label, source, shift.fixed)


@shift_rule("aten.embedding")
def embedding(walk: ShiftWalk, node: Node) -> Shift:
    """A row is read from a table: if all rows are shifted equally, so is the row that is read."""
    shift = walk.get(node.args[0])
    if shift is None:
        raise Blocked(node.name, node.op, "the index is shifted")
    if constant_along(shift.label, (0,)):
        return Shift(shift.label[0].expand(node.shape), shift.source[0].expand(node.shape), shift.fixed)
    columns = fold(shift.label, 0).expand(node.shape) if shift.label.stride(1) else fold(shift.label[:, :1], 0)
    label = mix(columns.expand(node.shape), walk.identity.of(node.args[1]).unsqueeze(-1))
    return Shift(label, torch.full(node.shape, MIXED, dtype=torch.int32), False)


@shift_rule("aten.masked_fill", "aten.where")
def masked(walk: ShiftWalk, node: Node) -> Shift:
    """A place filled with −∞ may count as shifted by any amount; elsewhere the shifts of both choices must agree."""
    picks = node.args[1:] if node.op == "aten.where" else (node.args[2], node.args[0])  # where the mask is true, or not
    mask = node.args[0] if node.op == "aten.where" else node.args[1]
    if walk.get(mask) is not None:
        raise Blocked(node.name, node.op, "the mask itself is shifted")
    kept = [p for p in picks if walk.get(p) is not None or not is_masked_out(walk, node, p)]
    shifts = [walk.get(p) for p in kept]
    moved = [s for s in shifts if s is not None]
    if len(kept) == 1:
        return with_label(moved[0], moved[0].label.expand(node.shape))
    zero = torch.zeros((), dtype=torch.int64).expand(node.shape)
    labels = [zero if s is None else s.label.expand(node.shape) for s in shifts]
    masks = walk.identity.of(mask).expand(node.shape)
    refuse_large(node, *(compact(x).shape for x in (*labels, masks)))
    chosen = plus(node.shape, mix(labels[0], 1, masks), mix(labels[1], 2, masks))
    first, second = compact(labels[0]), compact(labels[1])
    label = torch.where(first == second, first, compact(chosen)).expand(node.shape)
    fixed = all(s.fixed for s in moved) and not walk.depends_on_input(mask)
    return Shift(label, torch.full((), MIXED, dtype=torch.int32).expand(node.shape), fixed)


def is_lifted(graph: Graph, node: Node, large: float) -> bool:
    """Whether a large number is added to what a low one was filled into: a mask of 1e30, say, takes −1e30 back."""
    moved = {n.name for n in graph.downstream([node.name], lambda name: graph.nodes[name].op in AFFINE)}
    for name in moved:
        reader = graph.nodes[name]
        if reader.op in ("aten.add", "aten.sub"):
            others = [a for a in reader.args if not (isinstance(a, Ref) and a.name in moved)]
            sign = -1 if reader.op == "aten.sub" else 1
            if any(holds_large(graph, other, sign * reader.kwargs.get("alpha", 1), large) for other in others):
                return True
    return False


def holds_large(graph: Graph, value: Any, factor: float, large: float) -> bool:
    """Whether a number in the arithmetic behind a value is huge, with the sign of the factor; or either, if negated."""
    numbers, negated, stack, seen = [], False, [value], set[str]()
    while stack:
        found = stack.pop()
        if isinstance(found, (int, float)):
            numbers.append(float(found))
        elif isinstance(found, Ref) and found.name not in seen:
            seen.add(found.name)
            node = graph.node(found)
            known = constant_value(graph, node.name)
            if known is not None and known.numel():
                numbers += [float(known.max()), float(known.min())]
            elif node.op in AFFINE:
                negated |= node.op == "aten.neg"
                stack.extend(node.args)
    return any(abs(x) >= large and (negated or x * factor > 0) for x in numbers)


def is_masked_out(walk: ShiftWalk, node: Node, value: Any) -> bool:
    """Whether a place filled with this value has weight 0 in every softmax behind; a finite number may be lifted again.

    −1e9 does so in floating point, unless the other scores are about as low. That becomes a condition of the proof, and
    needs that nothing but softmaxes read the scores: a mean or a norm would notice how low they are.
    """
    highest = largest_number(walk.graph, value)
    if highest is None or highest > LOW_FILL:
        return False
    if highest > -math.inf and is_lifted(walk.graph, node, -highest / 2):
        return False
    if highest > MINUS_INFINITY:
        if not read_by_softmaxes_alone(walk.graph, node):
            return False
        walk.outcome.conditions.add(f"the mask's {highest:g} counts as −∞: scores must stay far above it")
    return True


def largest_number(graph: Graph, value: Any) -> float | None:
    """A number, or the largest one of a constant tensor; None where it is not known."""
    if isinstance(value, Ref):
        known = constant_value(graph, value.name) if graph.node(value).is_float else None
        return None if known is None or not known.numel() else float(known.max())
    return float(value) if isinstance(value, (int, float)) else None


def read_by_softmaxes_alone(graph: Graph, node: Node) -> bool:
    """Whether all paths from a value lead to a softmax, through further masks and sums.

    A log-softmax is none: what it returns for a masked place tells how low that was.
    """
    stack = [node]
    while stack:
        current = stack.pop()
        readers = graph.users[current.name]
        if current.name in graph.outputs or not readers:
            return False
        for reader in readers:
            if reader.op in PASS_SCORES_ON:
                stack.append(reader)
            elif reader.op != "softmax":
                return False
    return True


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
        return unknown_labels(node)
    if node.kwargs.get("mode", "constant") != "constant":
        return unknown_labels(node)
    return Shift(node.target(shift.label, node.args[1]), node.target(shift.source, node.args[1]), shift.fixed)
