"""How a change of basis passes norms, sums over an axis, masks and dropout; and where it ends."""

from __future__ import annotations

from fractions import Fraction

import torch

from deadweight.graph.node import Node
from deadweight.proof import field
from deadweight.proof.basis import TurnWalk, copies_of, signatures, turn_rule
from deadweight.proof.basis_rules.arithmetic import is_whole
from deadweight.proof.basis_rules.shapes import refuse_experts, uniform
from deadweight.proof.labels import fresh
from deadweight.proof.linear_form import Form, Slot, coordinate_axis, lines, scaled
from deadweight.proof.steps import Blocked


@turn_rule("core.rms", "core.unit", "core.layer")
def norm_core(walk: TurnWalk, node: Node) -> Form | None:
    """A norm commutes with rotations (LayerNorm: with those that keep the mean) and ignores a common scale."""
    form = walk.forms[node.args[0].name]
    slot = form.single
    if walk.contracts and node.op != "core.layer" and node.args[1] == 1 and form.gain is form.expert is None:
        walk.turned.norms.append(form)
        return scaled(form, field.generic(fresh((*node.shape[:-1], 1), node.name)).expand(node.shape))
    if slot is None or node.args[1] != 1 or form.power != 1:
        raise Blocked(node.name, node.op, "it reads sums of several coordinates")
    if walk.scalar:
        uniform(walk, node, slot)
    eps = float(node.args[-1])
    walk.turned.epsilon = max(eps, walk.turned.epsilon or 0.0)
    if walk.scalar:
        return None
    if form.gain is not None:
        raise Blocked(node.name, node.op, "a gain stands before the norm")
    split_by_vectors(walk, node, slot)
    walk.turned.rotations = True
    walk.turned.fixes_ones |= node.op == "core.layer"
    return scaled(form, field.generic(fresh((*node.shape[:-1], 1), node.name)).expand(node.shape))


def split_by_vectors(walk: TurnWalk, node: Node, slot: Slot) -> None:
    """Coordinates that stand in the same vectors of those that a norm reads side by side may be mixed.

    ‖(x, y)‖² = ‖x‖² + ‖y‖²: heads before they are joined, say. Every coordinate must be there; so may be other numbers,
    which no turn moves.
    """
    coordinate, factor = lines(slot)
    if not torch.equal(coordinate, coordinate[:1].expand_as(coordinate)):
        raise Blocked(node.name, node.op, "the vectors it reads are not whole")
    inside = coordinate[0] != 0
    if not is_whole(walk, coordinate[0]):
        raise Blocked(node.name, node.op, "the norm reads less than the whole space")
    along = coordinate[0][inside]
    walk.turned.split(signatures(along, copies_of(along, factor[:, inside]), walk.turned.size))


@turn_rule("aten.mean", "aten.sum")
def reduction(walk: TurnWalk, node: Node) -> Form:
    """A mean of vectors over positions turns alike."""
    refuse_experts(walk, node)
    form = walk.forms[node.args[0].name]
    slot = form.single
    rank = slot.coordinate.ndim if slot else 0
    axes = node.args[1] if len(node.args) > 1 else None
    axes = [] if axes is None else [axes] if isinstance(axes, int) else axes
    axis = None if slot is None else coordinate_axis(slot.coordinate)
    axes = [a % rank for a in axes] if rank else []
    if slot is None or not axes or (rank - 1 in axes and (axis is None or axis in axes)):
        raise Blocked(node.name, node.op, "it sums over coordinates")
    if not all(torch.equal(slot.coordinate, slot.coordinate.narrow(a, 0, 1).expand_as(slot.coordinate)) for a in axes):
        raise Blocked(node.name, node.op, "it sums over coordinates")
    coordinate = slot.coordinate.amin(axes).reshape(node.shape)
    factor = field.total(slot.factor, axes).reshape(node.shape)
    if node.op == "aten.mean":
        factor = field.times(factor, field.of(Fraction(node_count(node), slot.factor.numel())))
    return form.with_slots([Slot(coordinate, factor)])


def node_count(node: Node) -> int:
    return torch.Size(node.shape).numel()


@turn_rule("aten.masked_fill", "aten.where")
def masked(walk: TurnWalk, node: Node) -> Form:
    """Zeroing masked elements multiplies them by 0 or 1."""
    picks = node.args[1:] if node.op == "aten.where" else (node.args[2], node.args[0])  # where the mask is true, or not
    mask = node.args[0] if node.op == "aten.where" else node.args[1]
    forms = [walk.get(p) for p in picks]
    others = [p for p, f in zip(picks, forms, strict=True) if f is None]
    form = next((f for f in forms if f is not None), None)
    if form is None or len(others) != 1 or others[0] != 0:
        raise Blocked(node.name, node.op, "it replaces turned values by others")
    kept = walk.numbers_of(mask)
    kept = kept if forms[0] is not None else field.minus(torch.ones_like(kept), kept)
    return scaled(form, kept.expand(node.shape))


@turn_rule("aten.dropout", "aten.feature_dropout", "aten.native_dropout")
def dropout(walk: TurnWalk, node: Node) -> Form | list[Form | None]:
    """Dropout multiplies each element by a random factor of its own."""
    shape = walk.graph.node(node.args[0]).shape
    dropped = scaled(walk.forms[node.args[0].name], field.generic(fresh(shape, node.name)))
    return [dropped, None] if node.op == "aten.native_dropout" else dropped  # the second result is the mask


@turn_rule("output")
def reaches_output(walk: TurnWalk, node: Node) -> None:
    """What is returned may not turn."""
    raise Blocked(node.args[0].name, "output", "the turned value is the model's output")
