"""What the shift laws have already taken of a parameter, seen from a space that the parameter writes or reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.proof.basis import Site
from deadweight.proof.labels import compact


class Taken:
    """Directions u for which every motion x·uᵀ of a parameter, x in the space and u on its other side, is claimed."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        self.by_parameter: dict[str, list[ShiftClaim]] = {}
        for claim in claims:
            if isinstance(claim, ShiftClaim):
                self.by_parameter.setdefault(claim.node, []).append(claim)

    def directions(self, site: Site, index: Tensor, shape: tuple[int, ...]) -> int:
        """How many there are for the part of the space at these places of the site's axis."""
        claims = self.by_parameter.get(site.parameter, [])
        single = [c for c in claims if c.lost is None and element_wise(c)]
        common = [c for c in claims if c.lost is None and not element_wise(c)]
        count = columns(single, site.axis, index, shape)
        count += any(lost(c, index) for c in claims if c.lost is not None and site.role != "in")
        return count + sum(along(c, site.axis, index, shape) for c in common)


def columns(claims: list[ShiftClaim], axis: int, index: Tensor, shape: tuple[int, ...]) -> int:
    """Whole columns, element by element: a bias that folds, a row of a table that nothing reads."""
    if not claims:
        return 0
    claimed = torch.stack([(c.groups != 0).expand(shape).movedim(axis, 0)[index] for c in claims]).any(0)
    return int(claimed.all(0).sum())


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
