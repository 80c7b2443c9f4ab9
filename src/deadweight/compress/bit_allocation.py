"""How many bits each coordinate gets, and in which unit its code lies.

A row of a set of heads has a number of 16-bit units, and a unit is shared by a few codes of keys and of values
(`slim/codes.py`). A coordinate of cost c (twice the loss of leaving it out) adds ½ c · D(w) to the loss with w bits,
where D is the error of rounding a normal variable. Three problems are solved, the innermost first:

- *Within a unit*, the widths with the least loss for its 16 bits, exactly: D is convex, so each bit in turn goes where
  it saves most. This is repeated for every possible size of the lower half.
- *Within a row*, which coordinates share a unit: those that need many bits with those that need few, so that each unit
  needs about 16 bits.
- *Between attentions*, how many units each has: a multiple-choice knapsack, solved exactly by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from deadweight.slim.codes import LOW_BITS, SHIFT, STEP_ERRORS, UNIT, WIDEST, in_low_half
from deadweight.slim.format import MOST_FIELDS

NONE = float("inf")
ERRORS = torch.tensor(STEP_ERRORS, dtype=torch.float64)
SAVED = ERRORS[:-1] - ERRORS[1:]  # by the first bit of a coordinate, the second, …


@dataclass(frozen=True)
class RowPlan:
    """The units of a row: for every code its coordinate and its width, (fields, units); −1 is no coordinate."""

    key_fields: int
    coordinates: Tensor  # of keys in the first fields, of values in the others
    widths: Tensor
    loss: float

    def errors(self, size: int) -> Tensor:
        """The rounding errors of the first coordinates of keys; 1 for a coordinate without bits."""
        errors = torch.ones(size, dtype=torch.float64)
        at, widths = self.coordinates[: self.key_fields].flatten(), self.widths[: self.key_fields].flatten()
        errors[at[at >= 0]] = ERRORS[widths[at >= 0]]
        return errors


def fields_for(n_units: int, keys: int, values: int) -> tuple[int, int]:
    """How many codes of keys and of values share a unit, given the number of coordinates."""
    most = MOST_FIELDS // (2 if values else 1)
    key_fields, value_fields = (min(most, max(1, -(-n // n_units))) for n in (keys, values))
    return key_fields, value_fields if values else 0


@dataclass(frozen=True)
class Kind:
    """Coordinates that may lie in the same fields of a unit, those that cost most first."""

    fields: list[int]
    coordinates: Tensor
    costs: Tensor

    def by_field(self, n_units: int) -> Tensor:
        """Costs for all codes of these fields, (fields, units), filled up with zeros."""
        return pad_costs(self.costs, n_units * len(self.fields)).view(len(self.fields), n_units)

    def dropped(self, n_units: int) -> float:
        """The costs of coordinates for which there is no code."""
        return float(self.costs[n_units * len(self.fields) :].sum())

    def at(self, members: Tensor) -> Tensor:
        """The coordinates of these members; −1 is none."""
        size = max(int(members.max()) + 1, len(self.coordinates)) if members.numel() else 0
        return torch.nn.functional.pad(self.coordinates, (0, size - len(self.coordinates)), value=-1)[members]


def kinds_of(low: Sequence[bool], key_fields: int, key_costs: Tensor, value_costs: Tensor, upper: Tensor) -> list[Kind]:
    """Coordinates of keys and of values; those of keys apart by halves of a unit, if half of them are `upper`."""
    values = Kind(list(range(key_fields, len(low))), torch.arange(len(value_costs)), value_costs)
    if 2 * int(upper.sum()) != len(upper) or key_fields % 2:  # a half without room for its coordinates would lose them
        return [Kind(list(range(key_fields)), torch.arange(len(key_costs)), key_costs), values]
    halves = []
    for half in (True, False):
        at = (upper != half).nonzero().flatten()
        halves.append(Kind([f for f in range(key_fields) if low[f] == half], at, key_costs[at]))
    return [*halves, values]


def plan_row(n_units: int, key_costs: Tensor, value_costs: Tensor, upper: Tensor | None = None) -> RowPlan:
    """A row of `n_units` units for coordinates of these costs, which fall; `value_costs` may be empty.

    Codes of the coordinates of keys that are `upper` lie in the upper halves of units, and the others in lower ones, if
    there are as many of them and each half of a unit has as many codes of keys.
    """
    key_fields, value_fields = fields_for(n_units, len(key_costs), len(value_costs))
    low = in_low_half(key_fields, value_fields)
    none = torch.zeros(len(key_costs), dtype=torch.bool)
    kinds = kinds_of(low, key_fields, key_costs, value_costs, none if upper is None else upper)
    costs = torch.zeros(len(low), n_units, dtype=torch.float64)
    for kind in kinds:
        costs[kind.fields] = kind.by_field(n_units)
    members = share_units(wanted_bits(costs, UNIT * n_units), low, [kind.fields for kind in kinds])
    coordinates = torch.full_like(members, -1)
    for kind in kinds:
        own = members[kind.fields]
        coordinates[kind.fields] = kind.at(own)
        costs[kind.fields] = costs[kind.fields].flatten()[own]
    widths = best_widths(costs, low)
    coordinates = torch.where(widths > 0, coordinates, -1)
    loss = 0.5 * sum(kind.dropped(n_units) for kind in kinds) + 0.5 * float((costs * ERRORS[widths]).sum())
    return RowPlan(key_fields, coordinates, widths * (coordinates >= 0), loss)


def pad_costs(costs: Tensor, size: int) -> Tensor:
    """The first `size` costs, padded with zeros."""
    return torch.nn.functional.pad(costs[:size].double(), (0, max(0, size - len(costs))))


def wanted_bits(costs: Tensor, budget: int) -> Tensor:
    """The widths with the least loss for a total number of bits, if there were no units."""
    saved = costs[..., None] * SAVED
    taken = saved.flatten().argsort(descending=True, stable=True)[:budget]
    chosen = torch.zeros(saved.numel(), dtype=torch.long)
    chosen[taken[saved.flatten()[taken] > 0]] = 1
    return chosen.view(saved.shape).sum(-1)


def share_units(wanted: Tensor, low: Sequence[bool], kinds: Sequence[Sequence[int]]) -> Tensor:
    """The coordinate of every code, (fields, units), chosen so that all units need about the same number of bits.

    `kinds` are the fields of each kind of coordinates; `wanted` holds the bits of these coordinates, one for each code.
    Coordinates that need most bits are placed first, each in the emptiest unit with a free code of its kind, and there
    in the emptier half.
    """
    n_units = wanted.shape[1]
    places = {
        (kind, half): [f for f in own if low[f] == half] for kind, own in enumerate(kinds) for half in (True, False)
    }
    taken = {place: numpy.zeros(n_units, dtype=numpy.int64) for place in places}
    bits = {half: numpy.zeros(n_units, dtype=numpy.int64) for half in (True, False)}
    members = torch.zeros_like(wanted)
    items = [
        (-w, kind, i) for kind, own in enumerate(kinds) for i, w in enumerate(wanted[list(own)].flatten().tolist())
    ]
    for width, kind, index in sorted(items):
        best = None
        for half in (True, False):
            full = taken[kind, half] >= len(places[kind, half])
            rank = (bits[True] + bits[False]) * 64 + bits[half] + full * (1 << 40)
            unit = int(rank.argmin())
            best = min(best, (int(rank[unit]), unit, half)) if best is not None else (int(rank[unit]), unit, half)
        assert best is not None
        _, unit, half = best
        members[places[kind, half][taken[kind, half][unit]], unit] = index
        taken[kind, half][unit] += 1
        bits[half][unit] -= width
    return members


def best_widths(costs: Tensor, low: Sequence[bool]) -> Tensor:
    """The widths of the codes of every unit, (fields, units), with the least loss."""
    halves = [torch.tensor([f for f, is_low in enumerate(low) if is_low == half]) for half in (True, False)]
    best, least = torch.zeros(costs.shape, dtype=torch.long), torch.full((costs.shape[1],), NONE, dtype=torch.float64)
    for bits in range(SHIFT, LOW_BITS + 1):
        widths = torch.zeros_like(best)
        for half, room in zip(halves, (bits, UNIT - bits), strict=True):
            if len(half):
                widths[half] = give_bits(costs[half], room)
        loss = (costs * ERRORS[widths]).sum(0)
        better = loss < least
        best, least = torch.where(better, widths, best), torch.where(better, loss, least)
    return best


def give_bits(costs: Tensor, bits: int) -> Tensor:
    """Bits for the codes of half a unit, (fields, units): each bit goes where it saves most."""
    widths = torch.zeros(costs.shape, dtype=torch.long)
    saved = torch.nn.functional.pad(SAVED, (0, 1))
    for _ in range(bits):
        gain = costs * saved[widths]
        most, field = gain.max(0)
        widths.scatter_add_(0, field[None], (most > 0).long()[None])
    assert int(widths.max()) <= WIDEST
    return widths


def allocate_units(losses: Sequence[Tensor], sizes: Sequence[int], budget: int) -> list[int]:
    """Which option each attention takes, for the least total loss within a budget.

    `losses[i]` are those of the options of attention i; option k takes (k + 1) · sizes[i] of the budget.
    """
    room = min(budget, sum(len(own) * size for own, size in zip(losses, sizes, strict=True)))
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = []
    for own, size in zip(losses, sizes, strict=True):
        options = torch.full((len(own), room + 1), NONE, dtype=torch.float64)
        for k, loss in enumerate(own.tolist()):
            cost = (k + 1) * size
            if cost <= room:
                options[k, cost:] = best[: room + 1 - cost] + loss
        best, choice = options.min(0)
        taken.append(choice)
    left, chosen = room, []
    for choice, size in zip(reversed(taken), reversed(sizes), strict=True):
        chosen.append(int(choice[left]))
        left -= (chosen[-1] + 1) * size
    return chosen[::-1]
