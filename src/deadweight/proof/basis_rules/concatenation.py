"""Concatenation in a basis proof: vectors beside those of the space, as a learned key, a class token or padding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deadweight.graph.constants import is_zero
from deadweight.graph.node import Node
from deadweight.graph.rewriting import argument
from deadweight.proof import field
from deadweight.proof.absorb import parameter_view
from deadweight.proof.basis import Site, TurnWalk, turn_rule
from deadweight.proof.basis_rules.places import over_places
from deadweight.proof.labels import fresh
from deadweight.proof.linear_form import Form, Slot, coordinate_axis
from deadweight.proof.steps import Blocked


def vectors_beside(walk: TurnWalk, node: Node, names: Iterable[str]) -> dict[str, Form]:
    """What stands for the other operands of a concatenation along positions, with the coordinates of the turned one.

    Zero turns into zero. A parameter that is read here alone turns along. Whatever writes anything else has to turn.
    """
    like = next(form for n in node.inputs if isinstance(form := walk.forms.get(n), Form))
    slot, result = like.single, dict[str, Form]()
    for name in names:
        shape = walk.graph.nodes[name].shape
        if 0 in shape:  # an empty operand, of any rank, has nothing to turn
            nothing = torch.zeros(shape, dtype=torch.int64)
            result[name] = Form((Slot(nothing, nothing),), like.gain, power=like.power)
            continue
        coordinate = None if slot is None or like.expert is not None else coordinates_at(node, slot.coordinate, shape)
        if coordinate is None:
            walk.missing[name] = node.name
            continue
        factor = torch.zeros(shape, dtype=torch.int64)
        if not is_zero(walk.graph, name):
            factor = field.generic(fresh((*shape[:-1], 1), name, "vector")).expand(shape)
            if not turns_along(walk, name, coordinate, like):
                walk.missing[name] = node.name
        result[name] = Form((Slot(coordinate, torch.where(coordinate == 0, 0, factor)),), like.gain, power=like.power)
    return result


def coordinates_at(node: Node, coordinate: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The coordinates of the turned operand, for another one; None where they differ along the joined axis."""
    if node.op == "aten.stack":
        return coordinate
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    first = coordinate.narrow(axis, 0, 1)
    return first.expand(shape) if torch.equal(coordinate, first.expand_as(coordinate)) else None


def turns_along(walk: TurnWalk, name: str, coordinate: Tensor, like: Form) -> bool:
    """Whether the operand is a parameter, behind views, whose coordinates lie along one of its axes; it moves then."""
    view = parameter_view(walk.graph, name)
    chain = [name]
    while walk.graph.nodes[chain[-1]].op != "parameter" and len(walk.graph.nodes[chain[-1]].inputs) == 1:
        chain.append(walk.graph.nodes[chain[-1]].inputs[0])
    if view is None or any(len(walk.graph.users[n]) != 1 for n in chain):
        return False
    parameter, index = view
    shape = walk.graph.nodes[parameter].shape
    along = torch.full((torch.Size(shape).numel(),), -1, dtype=torch.int64)
    along[index.reshape(-1)] = coordinate.reshape(-1)
    if not torch.equal(along[index.reshape(-1)], coordinate.reshape(-1)) or bool((along < 0).any()):
        return False
    along = along.reshape(shape)
    axis = coordinate_axis(along)
    if axis is None:
        return False
    walk.turned.touched.update(chain)
    places = along.movedim(axis, 0).reshape(shape[axis], -1)[:, 0]
    if len(places[places != 0].unique()) < int((places != 0).sum()):
        return False  # several vectors side by side
    walk.turned.sites.append(Site(parameter, "out", axis, places, None, like.gain, power=like.power))
    return True


@turn_rule("aten.pad", "aten.constant_pad_nd")
def padding(walk: TurnWalk, node: Node) -> Form:
    """Zeros turn into zeros, copies of vectors turn as they do; a negative number cuts whole vectors off."""
    form, rank = walk.forms[node.args[0].name], len(node.shape)
    mode, value = padded_with(node)
    padded = [rank - 1 - i for i in range(len(node.args[1]) // 2) if any(node.args[1][2 * i : 2 * i + 2])]
    if mode != "constant":
        return over_places(node, form, sorted(padded), node.shape)
    if value not in (0, None):
        raise Blocked(node.name, node.op, "it pads with numbers that do not turn")
    if form.expert is not None:
        raise Blocked(node.name, node.op, "it moves rows that belong to experts")
    if form.gain is not None and rank - 1 in padded:
        raise Blocked(node.name, node.op, "it takes apart what a gain multiplies")
    slots = []
    for slot in form.slots:
        coordinate = slot.coordinate
        for axis in padded:
            first = coordinate.narrow(axis, 0, 1)
            if not torch.equal(coordinate, first.expand_as(coordinate)):
                raise Blocked(node.name, node.op, "it pads among coordinates")
            coordinate = first.expand([node.shape[a] if a == axis else n for a, n in enumerate(coordinate.shape)])
        slots.append(Slot(coordinate, torch.constant_pad_nd(slot.factor, node.args[1], 0)))
    return form.with_slots(slots)


def padded_with(node: Node) -> tuple[str, float | None]:
    """The mode and the number of a padding: aten.pad has both, aten.constant_pad_nd the number alone."""
    if node.op == "aten.constant_pad_nd":
        return "constant", argument(node, 2, "value")
    return argument(node, 2, "mode", "constant"), argument(node, 3, "value")
