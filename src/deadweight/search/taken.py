"""What the shift laws have already taken of a parameter, seen from a space that the parameter writes or reads."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.proof.basis import Site
from deadweight.proof.labels import compact


class Taken:
    """Directions u for which every motion x·uᵀ of a parameter, x in the space and u on its other side, is claimed."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        self.single: dict[str, list[ShiftClaim]] = {}  # by parameter: every element moves by itself
        self.common: dict[str, list[ShiftClaim]] = {}  # several elements move alike
        self.lost: dict[str, list[ShiftClaim]] = {}  # rows of a weight move along the direction that LayerNorm removed
        self.whole: set[str] = set()  # every element moves by itself, and others undo it
        for claim in claims:
            if claim.whole:
                self.whole.add(claim.node)
            if isinstance(claim, ShiftClaim):
                kind = self.single if element_wise(claim) else self.common
                kind = kind if claim.lost is None else self.lost
                kind.setdefault(claim.node, []).append(claim)

    def moves(self, site: Site, shape: tuple[int, ...]) -> Tensor:
        """Whether some element at each place of the site's axis is left, and not claimed by itself."""
        claimed = torch.full(shape, site.parameter in self.whole)
        for claim in self.single.get(site.parameter, []):
            claimed = claimed | (claim.groups.expand(shape) != 0)
        return ~claimed.movedim(site.axis, 0).reshape(shape[site.axis], -1).all(1)

    def directions(self, site: Site, index: Tensor, shape: tuple[int, ...]) -> int:
        """How many there are for the part of the space at these places of the site's axis."""
        name = site.parameter
        if name in self.whole:
            return prod(shape) // shape[site.axis]
        count = columns(self.single.get(name, []), site.axis, index, shape)
        count += site.role != "in" and any(lost(c, index) for c in self.lost.get(name, []))
        return count + sum(along(c, site.axis, index, shape) for c in self.common.get(name, []))


def columns(claims: list[ShiftClaim], axis: int, index: Tensor, shape: tuple[int, ...]) -> int:
    """Whole columns, element by element: a bias that folds, a row of a table that nothing reads."""
    if not claims:
        return 0
    claimed = torch.zeros((1,) * len(shape), dtype=torch.bool)
    for claim in claims:
        moved = (compact(claim.groups.expand(shape)) != 0).movedim(axis, 0)
        claimed = claimed | (moved[index] if len(moved) > 1 else moved)
    whole = claimed.all(0)
    others = torch.Size(shape).numel() // shape[axis]
    return int(whole.count_nonzero()) * (others // max(1, whole.numel()))


def lost(claim: ShiftClaim, index: Tensor) -> bool:
    """The direction that LayerNorm removed, for all these rows of a weight."""
    return bool((claim.groups.reshape(-1)[index] != 0).all())


def along(claim: ShiftClaim, axis: int, index: Tensor, shape: tuple[int, ...]) -> int:
    """Columns that move alike (a vector that moves between tables, a dead mean of the outputs) are one direction.

    A kernel of several taps has one dead mean for each. No number may stand at two places of the axis: these would move
    together, and x could not be chosen at will.
    """
    groups = compact(claim.groups)
    lines = groups.movedim(axis, 0).flatten(1) if len(shape) > 1 else groups.reshape(-1, 1)
    if len(lines) != shape[axis]:
        return 0  # the same at all places of the axis
    numbers, place, counts = lines.unique(dim=1).unique(return_inverse=True, return_counts=True)
    own = (counts == 1) & (numbers != 0)
    return int(own[place][index].all(0).sum())
