"""What rewrites of a basis share: turn a space so that a block of a matrix is the identity, and need not be stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.proof.turn import Site
from deadweight.rewrite.columns import amplification, common_columns, orthonormal
from deadweight.rewrite.known import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors, as_index
from deadweight.save.facts import Fact, IdentityBlocks

GROWTH = (1e3, 100.0, 50.0, 25.0)  # of rounding errors by an identity block: what is allowed, tried in turn


def places_of(site: Site, coordinates: list[int], copy: int | None = None) -> Tensor:
    """Where these coordinates stand along the site's axis, in their order."""
    present = site.coordinate if copy is None or site.copy is None else site.coordinate * (site.copy == copy)
    where: dict[int, int] = {}
    for place, coordinate in enumerate(present.tolist()):
        if coordinate in where and coordinate:
            raise NotDone("a coordinate stands at several places of one parameter")
        where[coordinate] = place
    return torch.tensor([where[c] for c in coordinates])


Action = tuple[Tensor, Tensor]  # places along an axis, and the matrix that mixes what stands there


def act_on(parameter: Tensor, axis: int, actions: Iterable[Action]) -> None:
    """Replace, in place, the slices at these places by matrix · slices."""
    along = parameter.movedim(axis, 0)
    for places, matrix in actions:
        where = as_slice(places)
        part = along[where]
        along[where] = (matrix @ part.reshape(len(places), -1)).reshape(part.shape)


def as_slice(places: Tensor) -> slice | Tensor:
    """Places that follow each other as a slice, which is not copied when it is read."""
    first, count = int(places[0]), len(places)
    return slice(first, first + count) if torch.equal(places, torch.arange(first, first + count)) else places


@dataclass(frozen=True, kw_only=True)
class BasisRewrite(Rewrite):
    """Common to both sides: which coordinates form a head, and which columns become the identity."""

    growth: float = GROWTH[0]  # of rounding errors, at most so many times

    def milder(self) -> Iterator[Rewrite]:
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
        """Raise if a matrix that is the identity by now would be turned."""
        for name in self.touches:
            if known.is_identity(name):
                raise NotDone(f"{name} is the identity already, and would no longer be")

    def turn(self, tensors: Tensors, actions: Sequence[tuple[Site, list[Action]]]) -> None:
        """Act on the parameters of these sites: all is known by now, nothing is left half done."""
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
            raise NotDone("the head is wider than the stream it reads")
        straight = torch.stack([orthonormal(weight[r]) for r in rows])  # heads × n × d
        columns = common_columns(straight, allowed)
        worst = amplification(straight, columns)
        if not worst < self.growth:
            raise NotDone(f"the best identity block would make rounding errors {worst:.0f} times larger")
        return columns

    def finish(self, tensors: Tensors, rows: list[Tensor], columns: Tensor) -> list[Fact]:
        """Round what must be the identity to exactly that."""
        site = self.own_site()
        weight = tensors[self.target].movedim(site.axis, 0).clone()
        for r in rows:
            weight[r[:, None], columns[None, :]] = torch.eye(len(columns), dtype=torch.float64)
        tensors[self.target] = weight.movedim(0, site.axis).contiguous()
        return [IdentityBlocks(self.target, site.axis, tuple(as_index(r) for r in rows), as_index(columns))]


def copies_of(site: Site, head: list[int]) -> list[int | None]:
    if site.copy is None:
        return [None]
    here = site.copy[torch.isin(site.coordinate, torch.tensor(head))].unique().tolist()
    return list(here)


def worthwhile(rewrite: BasisRewrite) -> BasisRewrite:
    """Blocks of at least 2 × 2: with rotary positions all coordinates of a key head are spoken for."""
    heads = rewrite.heads()
    if not heads or max(map(len, heads)) < 2:
        raise NotDone("rotary positions leave two numbers per plane: an identity block would cost more than it saves")
    return rewrite
