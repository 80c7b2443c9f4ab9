"""How a change of basis passes sums and products, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deadweight.graph.node import Node, Ref
from deadweight.proof import field
from deadweight.proof.basis import DifferentGains, Site, TurnWalk, copies_of, turn_rule
from deadweight.proof.linear_form import Form, Slot, added, coordinate_axis, lines, scaled
from deadweight.proof.powers import multiplied
from deadweight.proof.readers import is_vector_of_parameters
from deadweight.proof.steps import Blocked


@turn_rule("aten.add", "aten.sub")
def addition(walk: TurnWalk, node: Node) -> Form:
    """A sum of vectors of the space is a vector of the space; an added parameter turns along."""
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    alpha = node.kwargs.get("alpha", 1) * (-1 if node.op == "aten.sub" else 1)
    right = right if right is None or alpha == 1 else scaled(right, element(node, alpha))
    if left is not None and right is not None:
        if left.gain != right.gain:
            if not walk.gains:
                raise DifferentGains(node.name, node.op, "it adds values behind different gains")
            left, right = without_gain(walk, left), without_gain(walk, right)
        if (left.expert, left.power) != (right.expert, right.power):
            raise Blocked(node.name, node.op, "it adds values of different experts or powers")
        total = added(left, right, node.shape)
        if total is None:
            raise Blocked(node.name, node.op, "too many coordinates in one sum")
        return total
    form, other = (left, node.args[1]) if left is not None else (right, node.args[0])
    assert form is not None
    if not isinstance(other, Ref):
        if other == 0:
            return form
        raise Blocked(node.name, node.op, "a constant is added, which does not turn")
    add_parameter(walk, node, form, other)
    return grown(form, node)


def grown(form: Form, node: Node) -> Form:
    """The form at every element of a result that has more of them than the turned operand."""
    return form.with_slots([Slot(s.coordinate.expand(node.shape), s.factor.expand(node.shape)) for s in form.slots])


def without_gain(walk: TurnWalk, form: Form) -> Form:
    """The same value with the gain as a factor of each coordinate: what reads it scales coordinates, and mixes none."""
    return form if form.gain is None else scaled(replace(form, gain=None), walk.numbers_of(Ref(form.gain)))


def add_parameter(walk: TurnWalk, node: Node, form: Form, other: Ref) -> None:
    """A bias, position row or other parameter that is added to the vectors and read nowhere else."""
    slot = form.single
    if form.expert is not None:
        add_expert_bias(walk, node, form, other)
        return
    found, chain = walk.graph.node(other), [other.name]
    while found.op in ("aten.reshape", "aten.unsqueeze", "aten.expand") and isinstance(found.args[0], Ref):
        found = walk.graph.node(found.args[0])
        chain.append(found.name)
    once = all(len(walk.graph.users[name]) == 1 for name in chain if name != found.name)
    if found.op != "parameter" or not found.is_float or not once or slot is None:
        walk.missing[other.name] = node.name
        return
    coordinate = slot.coordinate.expand(node.shape)  # what is added may have more axes
    axis = coordinate_axis(coordinate)
    width = walk.graph.node(other).shape
    short = axis is None or len(width) < len(node.shape) - axis
    if axis is None or short or width[axis - len(node.shape)] != node.shape[axis]:
        walk.missing[other.name] = node.name
        return
    along = coordinate.movedim(axis, -1).reshape(-1, node.shape[axis])[0]
    long = [i for i, n in enumerate(found.shape) if n > 1]
    parameter_axis = axis - (len(node.shape) - len(found.shape))
    if len(chain) > 1 or len(long) == 1:  # behind views only a vector keeps its place for sure
        parameter_axis = long[0] if len(long) == 1 and found.shape[long[0]] == len(along) else -1
    if parameter_axis < 0:
        walk.missing[other.name] = node.name
        return
    copies = copies_added(slot, node, axis, along)
    site = Site(found.name, "out", parameter_axis, along, copies, form.gain, power=form.power)
    walk.added.setdefault(found.name, []).append((site, other.name, node.name))


def repeated(along: Tensor) -> bool:
    """Whether some coordinate occurs twice: several vectors of the space stand side by side."""
    present = along[along != 0]
    return len(present.unique()) < len(present)


def copies_added(slot: Slot, node: Node, axis: int, along: Tensor) -> Tensor | None:
    """Which of several vectors that stand side by side each number is added to; None where there is one."""
    if not repeated(along):
        return None
    factor = slot.factor.expand(node.shape).movedim(axis, -1).reshape(-1, node.shape[axis])
    return copies_of(along, factor)


def add_expert_bias(walk: TurnWalk, node: Node, form: Form, other: Ref) -> None:
    """A bias of each expert, looked up by the same index as its matrix, or standing at the same place."""
    slot, rows = form.single, walk.graph.node(other)
    if slot is not None and form.expert == "" and (site := stacked_bias(walk, node, slot, other)) is not None:
        walk.turned.sites.append(replace(site, gain=form.gain, power=form.power))
        return
    looked_up = rows.op == "aten.embedding" and rows.args[1] == Ref(form.expert or "")
    table = walk.graph.node(rows.args[0]) if looked_up else None
    once = slot is not None and not repeated(lines(slot)[0][0])
    if slot is None or not once or table is None or table.op != "parameter" or rows.shape != node.shape:
        raise Blocked(node.name, node.op, "what is added does not turn expert by expert")
    if any(len(walk.graph.users[name]) != 1 for name in (rows.name, table.name)):
        raise Blocked(node.name, node.op, f"{table.name} is read elsewhere too")
    walk.turned.touched.add(rows.name)  # the look-up turns along, and nothing but this sum reads it
    walk.turned.sites.append(Site(table.name, "out", 1, lines(slot)[0][0], None, form.gain, 0, power=form.power))


def stacked_bias(walk: TurnWalk, node: Node, slot: Slot, other: Ref) -> Site | None:
    """A parameter of shape experts × channels that is added to rows which stand in the order of the experts."""
    found, chain = walk.graph.node(other), [other.name]
    while found.op in ("aten.reshape", "aten.unsqueeze") and isinstance(found.args[0], Ref):
        found = walk.graph.node(found.args[0])
        chain.append(found.name)
    lengths = [n for n in found.shape if n > 1]
    fits = walk.graph.node(other).shape == (node.shape[0], 1, node.shape[-1]) and len(node.shape) == 3
    alone = all(len(walk.graph.users[name]) == 1 for name in chain)
    placed = found.shape[:1] == node.shape[:1] and lengths == [node.shape[0], node.shape[-1]]
    if found.op != "parameter" or not fits or not alone or not placed or repeated(lines(slot)[0][0]):
        return None
    walk.turned.touched.update(chain)
    return Site(found.name, "out", len(found.shape) - 1, lines(slot)[0][0], expert=0)


@turn_rule("aten.neg")
def negation(walk: TurnWalk, node: Node) -> Form:
    """The opposite vector turns alike."""
    return scaled(walk.forms[node.args[0].name], field.P - 1)


def element(node: Node, number: Any) -> int:
    """A constant factor as an element of the field."""
    try:
        return field.of(number)
    except (TypeError, ValueError) as error:
        raise Blocked(node.name, node.op, f"the factor {number} is no finite number") from error


@turn_rule("aten.mul", "aten.div")
def product(walk: TurnWalk, node: Node) -> Form:
    """A number times a vector turns alike; a factor per coordinate keeps only what it treats alike."""
    left, right = walk.get(node.args[0]), walk.get(node.args[1])
    if left is not None and right is not None:
        return multiplied(walk, node, left, right)
    if node.op == "aten.div" and (left is None or node.kwargs):
        raise Blocked(node.name, node.op, "the divisor turns, or the quotient is rounded")
    form, other = (left, node.args[1]) if left is not None else (right, node.args[0])
    assert form is not None
    divides = node.op == "aten.div"
    if not isinstance(other, Ref):
        factor = torch.tensor(element(node, other))
        return scaled(form, field.inverse(factor) if divides else factor)
    if node.op == "aten.mul" and is_gain(walk, node, form, other):
        return replace(grown(form, node), gain=other.name)
    if walk.scalar and not walk.graph.depends[other.name][1]:
        return grown(form, node)
    factor = walk.numbers_of(other)
    return scaled(form, (field.inverse(factor) if divides else factor).expand(node.shape))


def is_gain(walk: TurnWalk, node: Node, form: Form, other: Ref) -> bool:
    """Whether a parameter multiplies every coordinate of the whole space by a number of its own."""
    slot = form.single
    if slot is None or form.gain is not None or walk.scalar:
        return False
    if not is_vector_of_parameters(walk.graph, other.name, node.shape):
        return False
    return is_whole(walk, lines(slot)[0][0])


def is_whole(walk: TurnWalk, along: torch.Tensor) -> bool:
    """Whether all coordinates stand side by side, once or several times, perhaps beside others."""
    return len(along[along != 0].unique()) == walk.width
