"""Powers of a turned value: scales of single coordinates pass them, each raised to the power."""

from __future__ import annotations

from dataclasses import replace

import torch

from deadweight.graph.node import Node, Ref
from deadweight.proof.basis import TurnWalk, turn_rule
from deadweight.proof.linear_form import Form, Slot
from deadweight.proof.steps import Blocked

HIGHEST = 8  # of whole powers that are followed: more are not used


def multiplied(walk: TurnWalk, node: Node, left: Form, right: Form) -> Form:
    """Two values of the same coordinates, element by element: their powers add, as in ReLU(x)·ReLU(x)."""
    a, b = left.single, right.single
    alike = node.op == "aten.mul" and left.expert == right.expert and right.gain is None
    places = [s.coordinate.expand(node.shape) for s in (a, b) if s is not None]
    if not alike or len(places) < 2 or not torch.equal(*places):
        raise Blocked(node.name, node.op, "two turned values are multiplied element by element")
    return raised(walk, node, left, left.power + right.power)


def raised(walk: TurnWalk, node: Node, form: Form, power: int) -> Form:
    """Scales of single coordinates pass, each to that power."""
    slot = form.single
    if not walk.powers or walk.scalar or slot is None or form.gain is not None:
        raise Blocked(node.name, node.op, "a power of a turned value is no turned value")
    walk.turned.single_coordinates()
    return replace(form, slots=(Slot(slot.coordinate.expand(node.shape), slot.factor.expand(node.shape)),), power=power)


@turn_rule("aten.pow", "aten.square")
def whole_power(walk: TurnWalk, node: Node) -> Form:
    """(s·x)ⁿ = sⁿ·xⁿ: scales of single coordinates pass, to the power n."""
    form, power = walk.get(node.args[0]), node.args[1] if node.op == "aten.pow" else 2
    if form is None or isinstance(power, Ref) or power != int(power) or not 1 <= power <= HIGHEST:
        raise Blocked(node.name, node.op, "the exponent is no small whole number")
    return raised(walk, node, form, form.power * int(power))
