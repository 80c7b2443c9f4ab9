"""Rewrites of the basis laws: turn a head so that a block of its matrix is the identity, and need not be stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.laws.claim import Claim
from deadweight.laws.dw009_query_key_basis import ContractionClaim, alike, by_keys
from deadweight.laws.turn_claim import TurnClaim
from deadweight.proof.commutant import TOLERANCE, Products, connected, relative_maps
from deadweight.proof.turn import Site
from deadweight.reduce.facts import Fact, IdentityBlocks
from deadweight.reduce.rewrite import NotDone, Rewrite, Tensors, as_index

SWAPS = 200


def common_columns(blocks: list[Tensor], allowed: Tensor) -> Tensor:
    """Columns in which every block (n × d) is well conditioned.

    With orthonormal rows Q per block, the identity in columns J turns Q into R = Q_J⁻¹Q, and rounding grows with the
    size of R. Greedily, the column whose smallest share over all blocks is largest comes first; then columns are
    swapped for others as long as the sum of |R|² over the blocks falls.
    """
    rows = torch.stack([torch.linalg.qr(b.T, mode="reduced")[0].T for b in blocks])  # heads × n × d
    return torch.tensor(sorted(swapped(rows, greedy(rows, allowed), allowed).tolist()))


def greedy(rows: Tensor, allowed: Tensor) -> Tensor:
    rest, open_ = rows.clone(), allowed.clone()
    taken: list[int] = []
    for _ in range(rows.shape[1]):
        share = torch.where(open_, rest.square().sum(1).amin(0), -1.0)
        best = int(share.argmax())
        if float(share[best]) <= 1e-12:
            raise NotDone("no set of columns is invertible in every head")
        taken.append(best)
        open_[best] = False
        direction = rest[:, :, best]
        direction = direction / direction.norm(dim=1, keepdim=True)
        rest = rest - direction[:, :, None] * (direction[:, :, None] * rest).sum(1, keepdim=True)
    return torch.tensor(taken)


def swapped(rows: Tensor, columns: Tensor, allowed: Tensor) -> Tensor:
    """The best single swap, again and again: rank-one updates give the cost of all swaps at once."""
    columns = columns.clone()
    for _ in range(SWAPS):
        inverse = torch.linalg.inv(rows[:, :, columns])
        size = inverse.square().sum((1, 2))
        turned = inverse @ rows  # R: heads × n × d
        gram = inverse @ inverse.transpose(1, 2)
        own = torch.diagonal(gram, dim1=1, dim2=2)[:, :, None]
        change = torch.einsum("hki,hkj->hij", gram, turned) - own
        distance = turned.square().sum(1)[:, None, :] - 2 * turned + 1
        cost = (size[:, None, None] - 2 * change / turned + distance * own / turned.square()).sum(0)
        cost[:, ~allowed] = torch.inf
        cost[:, columns] = torch.inf
        cost = torch.where(torch.isfinite(cost), cost, torch.inf)
        out, into = divmod(int(cost.argmin()), cost.shape[1])
        if not float(cost[out, into]) < float(size.sum()) * (1 - 1e-9):
            break
        columns[out] = into
    return columns


def amplification(block: Tensor, columns: Tensor) -> float:
    """How much larger the turned rows are than orthonormal ones."""
    rows = torch.linalg.qr(block.T, mode="reduced")[0].T
    return float(torch.linalg.svdvals(rows[:, columns]).min().reciprocal())


def places_of(site: Site, coordinates: list[int], copy: int | None = None) -> Tensor:
    """Where these coordinates stand along the site's axis, in their order."""
    index = []
    for c in coordinates:
        here = site.coordinate == c
        if copy is not None and site.copy is not None:
            here = here & (site.copy == copy)
        found = here.nonzero().reshape(-1)
        if len(found) != 1:
            raise NotDone("a coordinate stands at several places of one parameter")
        index.append(int(found[0]))
    return torch.tensor(index)


def act_on(parameter: Tensor, axis: int, places: Tensor, matrix: Tensor) -> Tensor:
    """The parameter with the slices at these places replaced by matrix · slices."""
    along = parameter.movedim(axis, 0).clone()
    flat = along[places].reshape(len(places), -1)
    along[places] = (matrix @ flat).reshape(along[places].shape)
    return along.movedim(0, axis).contiguous()


@dataclass(frozen=True, kw_only=True)
class BasisRewrite(Rewrite):
    """Common to both sides: which coordinates form a head, and which columns become the identity."""

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

    def own_site(self) -> Site:
        wanted = {c for head in self.heads() for c in head}
        mine = [s for s in self.sites if s.parameter == self.claim.node and s.role == "out"]
        return next(s for s in mine if wanted <= set(s.coordinate.tolist()))

    def columns(self, weight: Tensor, rows: list[Tensor]) -> Tensor:
        """The columns for all heads; weight has its rows first."""
        allowed = torch.ones(weight.shape[1], dtype=torch.bool)
        for column in self.notes.empty_columns.get(self.target, ()):
            allowed[column] = False
        if int(allowed.sum()) < len(rows[0]):
            raise NotDone("the head is wider than the stream it reads")
        columns = common_columns([weight[r] for r in rows], allowed)
        worst = max(amplification(weight[r], columns) for r in rows)
        if not worst < self.notes.worst:
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


@dataclass(frozen=True, kw_only=True)
class ValueBasis(BasisRewrite):
    """W_V ← B⁻¹W_V, W_O ← W_O·B, where B is a block of W_V."""

    claim: TurnClaim

    def heads(self) -> list[list[int]]:
        site = next(s for s in self.sites if s.parameter == self.claim.node and s.role == "out")
        present = sorted(set(site.coordinate.tolist()) - {0})
        blocks: dict[int, list[int]] = {}
        for c in present:
            blocks.setdefault(int(self.claim.blocks[c]), []).append(c)
        return list(blocks.values())

    def apply(self, tensors: Tensors) -> list[Fact]:
        own, heads = self.own_site(), self.heads()
        if any(s.gain is not None or s.role not in ("out", "in") for s in self.sites):
            raise NotDone("a factor per channel stands inside the head")
        if len({len(h) for h in heads}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, h) for h in heads]
        columns = self.columns(weight, rows)
        blocks = [weight[r][:, columns].clone() for r in rows]
        for site in self.sites:
            name = self.name(site.parameter)
            moved = tensors[name]
            for head, block in zip(heads, blocks, strict=True):
                for copy in copies_of(site, head):
                    places = places_of(site, head, copy)
                    matrix = torch.linalg.inv(block) if site.role == "out" else block.T
                    moved = act_on(moved, site.axis, places, matrix)
            tensors[name] = moved
        return self.finish(tensors, rows, columns)


def copies_of(site: Site, head: list[int]) -> list[int | None]:
    if site.copy is None:
        return [None]
    here = site.copy[torch.isin(site.coordinate, torch.tensor(head))].unique().tolist()
    return list(here)


@dataclass(frozen=True)
class Meeting:
    """One key head: its coordinates, those of every query head it meets, and the map between them."""

    keys: list[int]
    queries: list[list[int]]
    map: Tensor  # queries × keys


@dataclass(frozen=True, kw_only=True)
class KeyBasis(BasisRewrite):
    """W_K ← B⁻¹W_K and W_Q ← (M·B·M⁻¹)ᵀW_Q, where B is a block of W_K and q·M·k is what counts."""

    claim: ContractionClaim

    def meetings(self) -> list[Meeting]:
        return [m for shared in by_keys(list(self.claim.products)) for m in free_parts(shared)]

    def heads(self) -> list[list[int]]:
        return [m.keys for m in self.meetings()]

    def apply(self, tensors: Tensors) -> list[Fact]:
        own, meetings = self.own_site(), self.meetings()
        if any(s.gain is not None or s.role != "out" for s in self.sites):
            raise NotDone("a factor per channel stands inside the head")
        if len({len(m.keys) for m in meetings}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, m.keys) for m in meetings]
        columns = self.columns(weight, rows)
        blocks = [weight[r][:, columns].clone() for r in rows]
        for site in self.sites:
            name = self.name(site.parameter)
            moved, mine = tensors[name], set(site.coordinate.tolist())
            for meeting, block in zip(meetings, blocks, strict=True):
                turn = (meeting.map @ block @ torch.linalg.inv(meeting.map)).T
                pairs = [(meeting.keys, torch.linalg.inv(block)), *((q, turn) for q in meeting.queries)]
                for coordinates, matrix in pairs:
                    if mine.issuperset(coordinates):
                        moved = act_on(moved, site.axis, places_of(site, coordinates), matrix)
            tensors[name] = moved
        return self.finish(tensors, rows, columns)


def free_parts(shared: list[Products]) -> Iterator[Meeting]:
    """The coordinates of a key head that may be mixed at will: all without rotary positions, else the unrotated."""
    first = shared[0]
    relative = relative_maps(first)
    if relative is None or not alike(shared):
        return
    alone = [c[0] for c in connected(relative.abs().amax(0) > TOLERANCE) if len(c) == 1]
    kinds: dict[tuple[float, ...], list[int]] = {}
    for c in alone:
        kinds.setdefault(tuple(round(float(t), 6) for t in relative[:, c, c]), []).append(c)
    if not kinds:
        return
    left = max(kinds.values(), key=len)
    linked = first.matrices[:, left].abs().amax(dim=(0, 1)) > TOLERANCE
    right = linked.nonzero().reshape(-1).tolist()
    strangers = [i for i in range(len(first.left)) if i not in left]
    if len(right) != len(left) or (
        strangers and bool((first.matrices[:, strangers][:, :, right].abs() > TOLERANCE).any())
    ):
        return
    best = max(first.matrices, key=lambda m: float(m[left][:, right].abs().max()))
    yield Meeting(
        [int(first.right[i]) for i in right], [[int(p.left[i]) for i in left] for p in shared], best[left][:, right]
    )


@dataclass(frozen=True, kw_only=True)
class WholeProjection(BasisRewrite):
    """x ← Θx with Θ the projection itself, which becomes the identity."""

    claim: TurnClaim

    def heads(self) -> list[list[int]]:
        site = self.reader()
        return [sorted(set(site.coordinate.tolist()) - {0})]

    def reader(self) -> Site:
        return next(s for s in self.sites if s.parameter == self.claim.node and s.role == "in")

    def apply(self, tensors: Tensors) -> list[Fact]:
        site = self.reader()
        theta = tensors[self.target].movedim(site.axis, 1)
        condition = float(torch.linalg.cond(theta))
        if not condition < self.notes.worst:
            raise NotDone(f"the projection has condition number {condition:.0f}; it would cost precision")
        if any(s.gain is not None or s.role not in ("out", "in") for s in self.sites):
            raise NotDone("a factor per channel stands on the stream")
        (stream,) = self.heads()
        for s in self.sites:
            name = self.name(s.parameter)
            matrix = theta if s.role == "out" else torch.linalg.inv(theta).T
            for copy in copies_of(s, stream):
                tensors[name] = act_on(tensors[name], s.axis, places_of(s, stream, copy), matrix)
        size = len(stream)
        tensors[self.target] = torch.eye(size, dtype=torch.float64)
        every = tuple(range(size))
        return [IdentityBlocks(self.target, 1 - site.axis, (every,), every)]


def basis_claim(claim: Claim) -> bool:
    return isinstance(claim, (TurnClaim, ContractionClaim))
