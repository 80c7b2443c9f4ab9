"""Common to rewrites of a basis: choose the basis so that a block of a matrix is the identity, which is not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.proof.basis import Site
from deadweight.rewrite.identity_columns import amplification, common_columns, orthonormal
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors, as_index
from deadweight.save.facts import Fact, IdentityBlocks

SINGULAR = 1e-14  # the smallest singular value over the largest: rounding leaves no more of a block without an inverse
GROWTH = (1e3, 100.0, 50.0, 25.0)  # limits on the growth of rounding errors by an identity block, tried in turn


def places_of(site: Site, coordinates: list[int], copy: int | None = None) -> Tensor:
    """The indices of these coordinates along the site's axis, in their order."""
    present = site.coordinate if copy is None or site.copy is None else site.coordinate * (site.copy == copy)
    where: dict[int, int] = {}
    for place, coordinate in enumerate(present.tolist()):
        if coordinate in where and coordinate:
            raise NotDone("one coordinate is at several indices of a parameter")
        where[coordinate] = place
    return torch.tensor([where[c] for c in coordinates])


Action = tuple[Tensor, Tensor]  # indices along an axis, and the matrix that multiplies the slices there


def act_on(parameter: Tensor, axis: int, actions: Iterable[Action]) -> None:
    """Replace, in place, the slices at these indices by matrix · slices."""
    along = parameter.movedim(axis, 0)
    for places, matrix in actions:
        where = as_slice(places)
        part = along[where]
        along[where] = (matrix @ part.reshape(len(places), -1)).reshape(part.shape)


def as_slice(places: Tensor) -> slice | Tensor:
    """Consecutive indices as a slice, which is read without a copy."""
    first, count = int(places[0]), len(places)
    return slice(first, first + count) if torch.equal(places, torch.arange(first, first + count)) else places


@dataclass(frozen=True, kw_only=True)
class BasisRewrite(Rewrite):
    """Which coordinates form a head, and which columns become the identity: the same for both kinds of head."""

    growth: float = GROWTH[0]  # limit on the growth of rounding errors

    def with_tighter_limits(self) -> Iterator[Rewrite]:
        return (replace(self, growth=growth) for growth in GROWTH if growth < self.growth)

    def heads(self) -> list[list[int]]:
        """Blocks of coordinates of the matrix that gets the identities."""
        raise NotImplementedError

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.parameter for s in self.sites))

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.claim.sites  # type: ignore[attr-defined]

    @property
    def saves(self) -> int:
        return sum(len(h) ** 2 for h in self.heads())

    def leave_identities(self, known: SettledFacts) -> None:
        """Raise if a matrix that is already the identity would change."""
        for name in self.touches:
            if known.is_identity(name):
                raise NotDone(f"{name} is already the identity, and would not stay so")

    def turn(self, tensors: Tensors, actions: Sequence[tuple[Site, list[Action]]]) -> None:
        """Multiply the parameters of these sites; nothing can fail from here on."""
        for site, mine in actions:
            parameter = self.value(tensors, site.parameter)
            act_on(parameter, site.axis, mine)
            tensors[self.name(site.parameter)] = parameter

    def own_site(self) -> Site:
        wanted = {c for head in self.heads() for c in head}
        mine = [s for s in self.sites if s.parameter == self.claim.node and s.role == "out"]
        return next(s for s in mine if wanted <= set(s.coordinate.tolist()))

    def columns(self, weight: Tensor, rows: list[Tensor], empty: Sequence[int]) -> Tensor:
        """The columns for all heads, none of them `empty`; weight has its rows first."""
        allowed = torch.ones(weight.shape[1], dtype=torch.bool)
        allowed[list(empty)] = False
        if int(allowed.sum()) < len(rows[0]):
            raise NotDone("the head is wider than the residual stream that it reads")
        straight = torch.stack([orthonormal(weight[r]) for r in rows])  # heads × n × d
        columns = common_columns(straight, allowed)
        worst = amplification(straight, columns)
        if not worst < self.growth:
            raise NotDone(f"even the best identity block would make rounding errors {worst:.0f} times larger")
        if any(is_singular(weight[r][:, columns]) for r in rows):
            raise NotDone("the rows of a head depend on each other: no block of them has an inverse")
        return columns

    def finish(self, tensors: Tensors, rows: list[Tensor], columns: Tensor) -> list[Fact]:
        """Set the identity blocks to exactly the identity."""
        site = self.own_site()
        weight = tensors[self.target].movedim(site.axis, 0).clone()
        for r in rows:
            weight[r[:, None], columns[None, :]] = torch.eye(len(columns), dtype=torch.float64)
        tensors[self.target] = weight.movedim(0, site.axis).contiguous()
        return [IdentityBlocks(self.target, site.axis, tuple(as_index(r) for r in rows), as_index(columns))]


def is_singular(block: Tensor) -> bool:
    values = torch.linalg.svdvals(block)
    return not float(values[-1]) > SINGULAR * float(values[0])


def copies_of(site: Site, head: list[int]) -> list[int | None]:
    if site.copy is None:
        return [None]
    here = site.copy[torch.isin(site.coordinate, torch.tensor(head))].unique().tolist()
    return list(here)


def worthwhile(rewrite: BasisRewrite) -> BasisRewrite:
    """The rewrite, if its blocks are at least 2 × 2: rotary position embeddings leave smaller ones."""
    heads = rewrite.heads()
    if not heads or max(map(len, heads)) < 2:
        raise NotDone("rotary pairs leave two free numbers each: an identity block would cost more than it saves")
    return rewrite
