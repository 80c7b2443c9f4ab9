"""How a change of basis passes linear maps, products of matrices, activations and recurrent layers."""

from __future__ import annotations

import math

import torch

from deadweight.graph.constants import constant_value
from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Node, Ref
from deadweight.proof import field
from deadweight.proof.basis import Contraction, Site, TurnWalk, turn_rule
from deadweight.proof.basis_rules.arithmetic import repeated
from deadweight.proof.basis_rules.shapes import refuse_experts, uniform
from deadweight.proof.identity_labels import LARGE
from deadweight.proof.labels import fold, fresh, mix
from deadweight.proof.linear_form import Form, Slot, channels_last, lines
from deadweight.proof.operation_groups import CONVOLUTIONS, POSITIVELY_HOMOGENEOUS, RECURRENT
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import groups_of, uses_of, weight_view


@turn_rule("linear", EXPERTS, *CONVOLUTIONS)
def linear(walk: TurnWalk, node: Node) -> None:
    """A linear map that reads the space undoes the turn in its own weight."""
    form, view = walk.get(node.args[0]), weight_view(walk.graph, node)
    if form is not None and view is None and is_depthwise(walk, node):
        read_channels(walk, node, channels_last(form))
        return
    if form is None or view is None:
        raise Blocked(node.name, node.op, "its weight is not a parameter used whole")
    if node.op in CONVOLUTIONS:
        form = channels_last(form)
    walk.read(node, view, view.input, form)


def is_depthwise(walk: TurnWalk, node: Node) -> bool:
    """A convolution that reads every channel by itself, with kernels of its own."""
    return node.op in CONVOLUTIONS and groups_of(node) == walk.graph.node(node.args[0]).shape[1]


def read_channels(walk: TurnWalk, node: Node, form: Form) -> None:
    """The kernels of a channel undo its scale; channels are not mixed, so nothing but scales is undone."""
    view, slot = weight_view(walk.graph, node, rows_only=True), form.single
    if view is None or slot is None:
        raise Blocked(node.name, node.op, "its weight is not a parameter used whole, or it reads sums of coordinates")
    often = walk.graph.nodes[view.parameter].shape[0] // slot.coordinate.shape[-1]
    spread = [x.repeat_interleave(often, -1) for x in (slot.coordinate, slot.factor)]
    walk.read(node, view, 0, form.with_slots([Slot(*spread)]))
    walk.turned.single_coordinates()


@turn_rule("aten.matmul", "bag")
def matmul(walk: TurnWalk, node: Node) -> Form | None:
    """Weighted sums of vectors turn alike; a product along the coordinates of two spaces is what must not change."""
    refuse_experts(walk, node)
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    if left is not None and right is not None:
        if not walk.contracts or left.power != 1 or right.power != 1:
            raise Blocked(node.name, node.op, "two values of the space are multiplied with each other")
        walk.turned.contractions.append(Contraction(node.name, left, right))
        return None
    form, other = (left, node.args[1]) if left is not None else (right, node.args[0])
    assert form is not None and isinstance(other, Ref)
    slot = form.single
    axis = -1 if left is not None else -2
    if slot is None or slot.coordinate.ndim < 2 or len(walk.graph.node(other).shape) < 2:
        raise Blocked(node.name, node.op, "sums of several coordinates are multiplied, or vectors")
    if not torch.equal(slot.coordinate, slot.coordinate.narrow(axis, 0, 1).expand_as(slot.coordinate)):
        raise Blocked(node.name, node.op, "it mixes coordinates with data")
    if left is None and is_long_sum(walk, other, slot):
        return form.with_slots([named_sums(walk, node, other, slot)])
    weights = walk.numbers_of(other)
    factor = field.matmul(slot.factor, weights) if left is not None else field.matmul(weights, slot.factor)
    coordinate = slot.coordinate.narrow(axis, 0, 1).expand(node.shape)
    return form.with_slots([Slot(coordinate, factor)])


def is_long_sum(walk: TurnWalk, weights: Ref, slot: Slot) -> bool:
    """Whether there are too many weights to compute with, and the vectors that they sum are whole."""
    node = walk.graph.node(weights)
    whole = torch.equal(slot.factor, slot.factor[..., :1].expand_as(slot.factor))
    return math.prod(node.shape) > LARGE and walk.identity.is_new(node) and whole


def named_sums(walk: TurnWalk, node: Node, weights: Ref, slot: Slot) -> Slot:
    """Sums of whole vectors are whole vectors: one factor each, named by the weights and by what they sum."""
    along = slot.coordinate.narrow(-2, 0, 1).expand(node.shape)
    sums = mix(walk.identity.lines(weights.name, -1), fold(slot.factor[..., :1] + 1, -2).unsqueeze(-2))
    return Slot(along, torch.where(along == 0, 0, field.generic(sums).expand(node.shape)))


@turn_rule(*(POSITIVELY_HOMOGENEOUS - RECURRENT))
def homogeneous(walk: TurnWalk, node: Node) -> Form:
    """f(s·x) = s·f(x) for s > 0: scales of single coordinates pass."""
    form = walk.get(node.args[0])
    if form is None or any(name in walk.forms for name in node.inputs[1:]):
        raise Blocked(node.name, node.op, "its slope turns")
    if form.single is None or form.gain is not None:
        raise Blocked(node.name, node.op, "it sees sums of several coordinates")
    walk.turned.single_coordinates()
    return form


@turn_rule(*RECURRENT)
def recurrent(walk: TurnWalk, node: Node) -> list[Form]:
    """h ← ReLU(x + W·h) is scaled unit by unit as x is, if rows and columns of W are scaled along."""
    gates, hidden, weight = node.args[:3]
    form = walk.get(gates)
    if node.op not in POSITIVELY_HOMOGENEOUS or form is None:
        raise Blocked(node.name, node.op, "tanh and sigmoid, or its weight, do not turn along")
    zero = constant_value(walk.graph, hidden.name)
    matrix = walk.graph.node(weight)
    plain = form.gain is None and form.power == 1 and matrix.op == "parameter"
    if zero is None or bool(zero.any()) or form.single is None or not plain:
        raise Blocked(node.name, node.op, "its initial state or its weight does not turn along")
    uniform(walk, node, form.single)
    along = lines(form.single)[0][0]
    if repeated(along):
        raise Blocked(node.name, node.op, "it reads several vectors of the space side by side")
    if not walk.scalar:
        if list(uses_of(walk.graph, matrix.name)) != [node.name]:
            raise Blocked(matrix.name, "parameter", "it is read elsewhere too (tied or shared)")
        walk.turned.single_coordinates()
        walk.turned.sites.append(Site(matrix.name, "out", 0, along))
        walk.readings.setdefault(matrix.name, []).append(Site(matrix.name, "in", 1, along, torch.zeros_like(along)))
    return [vectors(walk, node, along, k) for k in range(2)]


def vectors(walk: TurnWalk, node: Node, along: torch.Tensor, result: int) -> Form:
    """One of its results: these coordinates along the last axis, and a factor for each vector."""
    shape = walk.graph.node(node.args[result]).shape
    factor = field.generic(fresh((*shape[:-1], 1), node.name, result)).expand(shape)
    return Form((Slot(along.expand(shape), torch.where(along == 0, 0, factor)),))
