"""Operations on places, channel by channel, in a basis proof: pooling, running sums, maxima, scattered rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deadweight.graph.constants import is_zero
from deadweight.graph.node import Node, Ref
from deadweight.graph.rewriting import argument
from deadweight.proof import field
from deadweight.proof.basis import TurnWalk, turn_rule
from deadweight.proof.labels import fold, fresh, mix
from deadweight.proof.linear_form import Form, Slot, added
from deadweight.proof.operation_groups import AVERAGES_OF_PLACES, HOMOGENEOUS_OVER_PLACES
from deadweight.proof.steps import Blocked

DIM_ARGUMENT = {"aten.linalg_vector_norm": 2, "aten.topk": 2, "aten.kthvalue": 2}  # of all others it is argument 1
LAST_BY_DEFAULT = {"aten.topk", "aten.sort", "aten.kthvalue", "aten.median"}
MIXES = {"sum", "mean", "amax", "amin"}  # ways to reduce what is scattered to one place: f(s·x) = s·f(x) for s > 0


def acted_axes(node: Node, rank: int) -> tuple[int, ...]:
    """The axes on which an operation acts: those in its name (pool2d: the last two), or those it is given."""
    if node.op[-2:] in ("1d", "2d", "3d"):
        return tuple(range(rank - int(node.op[-2]), rank))
    default = -1 if node.op in LAST_BY_DEFAULT else None
    given = argument(node, DIM_ARGUMENT.get(node.op, 1), "dim", default)
    axes = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    if isinstance(given, (Ref, str)):
        raise Blocked(node.name, node.op, "it compares two values")
    return tuple(a % rank for a in axes)


def over_places(node: Node, form: Form, axes: Sequence[int], shape: tuple[int, ...]) -> Form:
    """What becomes of vectors at several places, if every channel is treated alike: vectors at the places of `shape`.

    Elements whose factors agreed at every place agree in every result.
    """
    slot = form.single
    if slot is None or form.gain is not None or form.expert is not None:
        raise Blocked(node.name, node.op, "it sees sums of several coordinates, a gain, or rows of experts")
    kept = [a for a in range(slot.coordinate.ndim) if a not in axes]
    first = slot.coordinate
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    if not torch.equal(slot.coordinate, first.expand_as(slot.coordinate)):
        raise Blocked(node.name, node.op, "it acts along the coordinates")
    alike = fold(slot.factor.permute(*kept, *axes).flatten(len(kept)) + 1, -1)  # + 1: a label of 0 would vanish
    if len(shape) == slot.coordinate.ndim:
        if any(shape[a] != first.shape[a] for a in kept):
            raise Blocked(node.name, node.op, "it moves coordinates")
        alike = alike.reshape(first.shape)
        places = fresh(tuple(n if a in axes else 1 for a, n in enumerate(shape)), node.name, "places")
    else:
        first, places = first.reshape(alike.shape), fresh((1,) * len(shape), node.name, "places")
        if alike.shape != shape:
            raise Blocked(node.name, node.op, "it moves coordinates")
    coordinate = first.expand(shape)
    numbers = field.generic(mix(alike.expand(shape), places))
    return form.with_slots([Slot(coordinate, torch.where(coordinate == 0, 0, numbers))])


def results(walk: TurnWalk, node: Node, axes: Sequence[int], form: Form) -> Form | list[Form | None]:
    """One value; or two, of which the second are indices that no scale changes."""
    parts = [user for user in walk.graph.users[node.name] if user.op == "getitem"]
    if not parts:
        return over_places(node, form, axes, node.shape)
    first = next((part for part in parts if part.args[1] == 0), None)
    return [None if first is None else over_places(node, form, axes, first.shape), None]


def only_operand(walk: TurnWalk, node: Node) -> Form:
    form = walk.get(node.args[0])
    if form is None or any(name in walk.forms for name in node.inputs[1:]):
        raise Blocked(node.name, node.op, "it compares two values")
    return form


@turn_rule(*AVERAGES_OF_PLACES)
def averages(walk: TurnWalk, node: Node) -> Form | list[Form | None]:
    """A weighted sum over places, with the same weights in every channel, turns as its vectors do."""
    form = only_operand(walk, node)
    assert form.slots
    return results(walk, node, acted_axes(node, form.slots[0].coordinate.ndim), form)


@turn_rule(*HOMOGENEOUS_OVER_PLACES)
def homogeneous_over_places(walk: TurnWalk, node: Node) -> Form | list[Form | None]:
    """f(s·x) = s·f(x) for s > 0 of all places of a channel: scales of single coordinates pass."""
    form = only_operand(walk, node)
    moved = results(walk, node, acted_axes(node, form.slots[0].coordinate.ndim), form)
    walk.turned.single_coordinates()
    return moved


@turn_rule("aten.index_add", "aten.scatter_add", "aten.scatter_reduce")
def scattered(walk: TurnWalk, node: Node) -> Form:
    """Vectors that are added to rows of zeros, or to vectors of the space, are vectors of the space."""
    onto, form = walk.get(node.args[0]), walk.get(node.args[3])
    zero = onto is None and isinstance(node.args[0], Ref) and is_zero(walk.graph, node.args[0].name)
    if form is None or not (zero or onto is not None):
        raise Blocked(node.name, node.op, "what it adds, or what it adds to, does not turn along")
    shape = form.slots[0].coordinate.shape
    if node.op != "aten.index_add":
        reduces = node.args[4] if node.op == "aten.scatter_reduce" else "sum"
        if reduces not in MIXES or walk.graph.node(node.args[2]).shape != tuple(shape) or onto is not None:
            raise Blocked(node.name, node.op, "it multiplies what it scatters, or leaves some of it out")
        walk.turned.single_coordinates()  # every channel may have an index of its own
    moved = over_places(node, form, (node.args[1] % len(shape),), node.shape)
    if onto is None:
        return moved
    alike = (onto.gain, onto.expert, onto.power) == (moved.gain, moved.expert, moved.power)
    total = added(onto, moved, node.shape) if alike else None
    if total is None:
        raise Blocked(node.name, node.op, "it adds values of different gains, experts or powers")
    return total
