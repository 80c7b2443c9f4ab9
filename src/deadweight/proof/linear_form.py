"""Linear forms: a traced value as a linear image of vectors in one space, coordinate by coordinate.

A basis proof turns every vector of a space by the same matrix. An element of a tensor that is Σ_k aₖ·x[cₖ] is kept as
slots (cₖ, aₖ): which coordinate, and with which factor. Factors are random elements of a finite field that stand for
what the graph would compute there (one element per identity label and position): two factors are equal if they are for
all inputs, and otherwise differ but for a probability of about 2⁻⁶⁰. Nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from deadweight.proof import field

MAX_SLOTS = 4


@dataclass(frozen=True)
class Slot:
    """A coordinate (0: none) and a factor, an element of the field, for each element."""

    coordinate: Int64[Tensor, ...]
    factor: field.Elements


@dataclass(frozen=True)
class Form:
    """The sum of its slots; `gain` names the parameter vector that multiplies the turned value, if any.

    `expert` says how rows find their expert, where every expert has a space of its own: by the index of that node, or
    by their place along the first axis ("").
    """

    slots: tuple[Slot, ...]
    gain: str | None = None
    expert: str | None = None
    power: int = 1  # of single coordinates: what scales them by s scales the value by s to this power

    @property
    def single(self) -> Slot | None:
        return self.slots[0] if len(self.slots) == 1 else None

    def with_slots(self, slots: list[Slot] | tuple[Slot, ...]) -> Form:
        return replace(self, slots=tuple(slots))


def scaled(form: Form, factor: field.Elements | int) -> Form:
    """The form times an element of the field, or one for each element of the value."""
    slots = [(s.coordinate, field.times(s.factor, factor)) for s in form.slots]
    return form.with_slots([Slot(coordinate.expand(product.shape), product) for coordinate, product in slots])


def added(left: Form, right: Form, shape: tuple[int, ...]) -> Form | None:
    """The sum; slots with the same coordinates everywhere are joined. None if it takes too many slots."""
    slots = [Slot(s.coordinate.expand(shape), s.factor.expand(shape)) for s in left.slots]
    for extra in right.slots:
        extra = Slot(extra.coordinate.expand(shape), extra.factor.expand(shape))
        for i, slot in enumerate(slots):
            if torch.equal(slot.coordinate, extra.coordinate):
                slots[i] = Slot(slot.coordinate, field.plus(slot.factor, extra.factor))
                break
        else:
            slots.append(extra)
    return left.with_slots(slots) if len(slots) <= MAX_SLOTS else None


def lines(slot: Slot) -> tuple[Tensor, Tensor]:
    """(rows, channels) views of coordinates and factors along the last axis."""
    width = slot.coordinate.shape[-1]
    return slot.coordinate.reshape(-1, width), slot.factor.reshape(-1, width)


def coordinate_axis(coordinate: Tensor) -> int | None:
    """The one axis along which coordinates differ."""
    varying = [
        a
        for a in range(coordinate.ndim)
        if not torch.equal(coordinate, coordinate.narrow(a, 0, 1).expand_as(coordinate))
    ]
    if not varying:
        return coordinate.ndim - 1
    return varying[0] if len(varying) == 1 else None


def channels_last(form: Form) -> Form:
    return form.with_slots([Slot(s.coordinate.movedim(1, -1), s.factor.movedim(1, -1)) for s in form.slots])
