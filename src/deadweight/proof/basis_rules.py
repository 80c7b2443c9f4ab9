"""How a change of basis passes each operation. The first line of a rule is its theorem."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from deadweight.graph.constants import constant_value, known_indices
from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Node, Ref
from deadweight.proof import field
from deadweight.proof.basis import Contraction, DifferentGains, Site, TurnWalk, copies_of, signatures, turn_rule
from deadweight.proof.concatenation import vectors_beside
from deadweight.proof.identity_labels import LARGE
from deadweight.proof.labels import fold, fresh, mix
from deadweight.proof.linear_form import Form, Slot, added, channels_last, coordinate_axis, lines, scaled
from deadweight.proof.operation_groups import CONVOLUTIONS, INDEXED, POSITIVELY_HOMOGENEOUS, RECURRENT, SHAPE
from deadweight.proof.powers import multiplied
from deadweight.proof.readers import is_vector_of_parameters, picks_along_last
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import groups_of, uses_of, weight_view


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
