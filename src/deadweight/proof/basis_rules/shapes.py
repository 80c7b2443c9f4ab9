"""How a change of basis passes operations that move, select or join elements."""

from __future__ import annotations

from typing import Any

import torch

from deadweight.graph.constants import known_indices
from deadweight.graph.node import Node
from deadweight.proof import field
from deadweight.proof.basis import TurnWalk, turn_rule
from deadweight.proof.basis_rules.concatenation import vectors_beside
from deadweight.proof.labels import fold, fresh, mix
from deadweight.proof.linear_form import Form, Slot, lines
from deadweight.proof.operation_groups import INDEXED, SHAPE
from deadweight.proof.readers import picks_along_last
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked


@turn_rule(*(SHAPE - INDEXED))
def shape(walk: TurnWalk, node: Node) -> Any:
    """It moves elements, each with its coordinate."""
    if node.op == "getitem":
        return walk.forms[node.args[0].name][node.args[1]]
    expert = expert_kept(walk, node)
    forms = [walk.forms[n] for n in node.inputs if n in walk.forms]
    missing = [n for n in node.inputs if n not in walk.forms]
    beside = {}
    if missing and node.op in ("aten.cat", "aten.stack") and joins_same_space(walk, node):
        beside = vectors_beside(walk, node, missing)
    count = max(len(f.slots) for f in forms)
    slots = [run_slot(walk, node, k, beside) for k in range(count)]
    gains, powers = {f.gain for f in forms}, {f.power for f in forms}
    if len(gains) > 1 or len(powers) > 1:
        raise Blocked(node.name, node.op, "it joins values behind different gains or powers")
    if gains != {None} and not keeps_last_axis(walk, node):
        raise Blocked(node.name, node.op, "it takes apart what a gain multiplies")
    gain, power = gains.pop(), powers.pop()
    if isinstance(slots[0], list):
        return [Form(tuple(column), gain, expert, power) for column in zip(*slots, strict=True)]
    return Form(tuple(slots), gain, expert, power)


def expert_kept(walk: TurnWalk, node: Node) -> str | None:
    """Rows that belong to experts must stay where they are: only the last axis may be taken apart."""
    found = {walk.forms[n].expert for n in node.inputs if isinstance(walk.forms.get(n), Form)} - {None}
    if not found:
        return None
    before = walk.graph.node(node.inputs[0])
    rank = len(before.shape)
    axis = {"aten.split": 2, "aten.split_with_sizes": 2, "aten.chunk": 2, "aten.slice": 1, "aten.narrow": 1}.get(
        node.op
    )
    default = 0 if axis is not None else None
    place = node.args[axis] if axis is not None and len(node.args) > axis else node.kwargs.get("dim", default)
    if len(found) > 1 or place is None or place % rank != rank - 1:
        raise Blocked(node.name, node.op, "it moves rows that belong to experts")
    return found.pop()


def keeps_last_axis(walk: TurnWalk, node: Node) -> bool:
    """Whether every element stays in its channel: channel numbers, moved as the elements are, stay where they were."""

    def channels(name: str) -> torch.Tensor:
        shape = walk.graph.nodes[name].shape
        return torch.arange(shape[-1] if shape else 1).expand(shape)

    moved = move(walk.graph, node, channels)
    if not isinstance(moved, torch.Tensor) or not node.shape:
        return False
    return torch.equal(moved, torch.arange(node.shape[-1]).expand(node.shape))


def joins_same_space(walk: TurnWalk, node: Node) -> bool:
    """Whether a concatenation puts vectors side by side (along positions) rather than coordinates."""
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(node.shape)
    return node.op == "aten.stack" or axis % rank != rank - 1


def run_slot(walk: TurnWalk, node: Node, k: int, beside: dict[str, Form]) -> Any:
    def part(name: str, attribute: str) -> torch.Tensor:
        form = beside.get(name, walk.forms.get(name))
        if isinstance(form, Form) and k < len(form.slots):
            return getattr(form.slots[k], attribute)
        return torch.zeros(walk.graph.nodes[name].shape, dtype=torch.int64)

    coordinate, factor = (move(walk.graph, node, lambda n, a=a: part(n, a)) for a in ("coordinate", "factor"))  # type: ignore[misc]
    if isinstance(coordinate, (list, tuple)):
        return [Slot(c, f) for c, f in zip(coordinate, factor, strict=True)]
    return Slot(coordinate, factor)


@turn_rule(*INDEXED)
def index(walk: TurnWalk, node: Node) -> Form:
    """It picks whole vectors: which ones does not matter."""
    refuse_experts(walk, node)
    form = walk.get(node.args[0])
    known = known_indices(walk.graph, node)
    if form is not None and known is not None and node.target is not None:
        return form.with_slots(
            [Slot(node.target(s.coordinate, known), node.target(s.factor, known)) for s in form.slots]
        )
    slot = form.single if form is not None else None
    if node.op == "aten.index_select" and form is not None and node.args[1] % len(node.shape) < len(node.shape) - 1:
        return picked_vectors(walk, node, form, node)
    if form is None or slot is None or node.op != "aten.index" or node.target is None:
        raise Blocked(node.name, node.op, "it picks single coordinates")
    if picks_along_last(walk.graph, node, slot.coordinate.ndim):
        raise Blocked(node.name, node.op, "it picks single coordinates")
    uniform(walk, node, slot)
    coordinate = lines(slot)[0][0].expand(node.shape)
    factor = field.generic(fresh((*node.shape[:-1], 1), node.name)).expand(node.shape)
    return form.with_slots([Slot(coordinate, factor)])


def picked_vectors(walk: TurnWalk, node: Node, form: Form, result: Node) -> Form:
    """Whole vectors at other places: elements whose factors agree in every vector agree in every one that is picked."""
    if form.single is None:
        raise Blocked(node.name, node.op, "it picks sums of several coordinates")
    coordinate, factor = lines(form.single)
    if not torch.equal(coordinate, coordinate[:1].expand_as(coordinate)):
        raise Blocked(node.name, node.op, "the coordinates it reads differ from position to position")
    along, alike = coordinate[0].expand(result.shape), fold(factor + 1, 0)  # + 1: a label of 0 would vanish
    numbers = mix(fresh((*result.shape[:-1], 1), result.name).expand(result.shape), alike)
    return form.with_slots([Slot(along, torch.where(along == 0, 0, field.generic(numbers)))])


@turn_rule("recurrent.pack", "recurrent.pad")
def packing(walk: TurnWalk, node: Node) -> list[Form | None]:
    """Packing picks whole vectors; padding puts zeros beside them."""
    refuse_experts(walk, node)
    form = walk.get(node.args[0])
    result = next((user for user in walk.graph.users[node.name] if user.args[1] == 0), None)
    if form is None or (node.op == "recurrent.pad" and node.args[3] != 0):
        raise Blocked(node.name, node.op, "it pads with a number that does not turn")
    return [None if result is None else picked_vectors(walk, node, form, result), None]


def refuse_experts(walk: TurnWalk, node: Node) -> None:
    """Rows of different experts may not be mixed or moved."""
    if any(isinstance(f, Form) and f.expert is not None for f in map(walk.forms.get, node.inputs)):
        raise Blocked(node.name, node.op, "it moves or mixes rows that belong to experts")


def uniform(walk: TurnWalk, node: Node, slot: Slot) -> None:
    """Coordinates along the last axis, the same at all positions, each vector with one factor."""
    coordinate, factor = lines(slot)
    same = torch.equal(coordinate, coordinate[:1].expand_as(coordinate))
    if not same or not torch.equal(factor, factor[:, :1].expand_as(factor)):
        raise Blocked(node.name, node.op, "the vectors it reads are not whole")
