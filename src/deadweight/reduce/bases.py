"""Rewrites of the basis laws: turn a head so that a block of its matrix is the identity, and need not be stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.laws.dw009_query_key_basis import ContractionClaim
from deadweight.laws.head_parts import HeadPart
from deadweight.laws.turn_claim import TurnClaim
from deadweight.proof.turn import Site
from deadweight.reduce.known import Known
from deadweight.reduce.rewrite import NotDone, Rewrite, Tensors, as_index
from deadweight.save.facts import Fact, IdentityBlocks
from deadweight.threads import inverse

SWAPS = 200
POOL = 512  # columns
COARSE = 1e6
GROWTH = (1e3, 100.0, 50.0, 25.0)  # of rounding errors by an identity block: what is allowed, tried in turn


def common_columns(rows: Tensor, allowed: Tensor) -> Tensor:
    """Columns in which every block (of heads × n × d, its rows orthonormal) is well conditioned.

    With rows Q of a block, the identity in columns J turns Q into R = Q_J⁻¹Q, and rounding grows with the
    size of R. Greedily, the column whose smallest share over all blocks is largest comes first; then columns are
    swapped for others as long as the sum of |R|² over the blocks falls. Of a wide matrix only the columns with the
    largest shares are looked at.
    """
    share = coarse(torch.where(allowed, rows.square().sum(1).amin(0), -1.0))
    pool = share.argsort(descending=True, stable=True)[: max(POOL, 4 * rows.shape[1])].sort().values
    few, can = rows[:, :, pool].contiguous(), allowed[pool]
    return pool[swapped(few, greedy(few, can), can).sort().values]


def coarse(share: Tensor) -> Tensor:
    """Shares to six digits: of columns that are as good as each other the first is taken, however sums are rounded."""
    return (share * COARSE).round()


def orthonormal(block: Tensor) -> Tensor:
    """A basis of the same row space: by the small Gram matrix where that is exact enough, else by QR."""
    gram = block @ block.T
    factor, info = torch.linalg.cholesky_ex(gram)
    diagonal = torch.diagonal(factor)
    if int(info) == 0 and float(diagonal.min()) > 1e-5 * float(diagonal.max()):
        return torch.linalg.solve_triangular(factor, block, upper=False)
    return torch.linalg.qr(block.T, mode="reduced")[0].T


def greedy(rows: Tensor, allowed: Tensor) -> Tensor:
    """One column after the other; what the columns taken so far span in each block is subtracted from the rest."""
    share = rows.square().sum(1)  # heads × d
    open_, taken = allowed.clone(), list[int]()
    spanned = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])  # heads × taken × n, orthonormal
    for i in range(rows.shape[1]):
        smallest = torch.where(open_, share.amin(0), -1.0)
        best = int(coarse(smallest).argmax())
        if float(smallest[best]) <= 1e-12:
            raise NotDone("no set of columns is invertible in every head")
        taken.append(best)
        open_[best] = False
        direction = rows[:, :, best]
        for _ in range(2):  # twice is enough
            direction = direction - (spanned.transpose(1, 2) @ (spanned @ direction[:, :, None]))[:, :, 0]
        direction = direction / direction.norm(dim=1, keepdim=True)
        spanned[:, i] = direction
        share = share - (direction[:, None, :] @ rows)[:, 0].square()
    return torch.tensor(taken)


def swapped(rows: Tensor, columns: Tensor, allowed: Tensor) -> Tensor:
    """The best single swap, again and again: rank-one updates give the cost of all swaps at once."""
    columns = columns.clone()
    for _ in range(SWAPS):
        back = inverse(rows[:, :, columns])
        size = back.square().sum((1, 2))
        turned = back @ rows  # R: heads × n × d
        gram = back @ back.transpose(1, 2)
        own = torch.diagonal(gram, dim1=1, dim2=2)[:, :, None]
        change = torch.einsum("hki,hkj->hij", gram, turned) - own
        distance = turned.square().sum(1)[:, None, :] - 2 * turned + 1
        cost = (size[:, None, None] - 2 * change / turned + distance * own / turned.square()).sum(0)
        cost[:, ~allowed] = torch.inf
        cost[:, columns] = torch.inf
        cost = torch.where(torch.isfinite(cost), cost, torch.inf)
        out, into = divmod(int(coarse(cost / size.sum()).argmin()), cost.shape[1])
        if not float(cost[out, into]) < float(size.sum()) * (1 - 1 / COARSE):
            break
        columns[out] = into
    return columns


def amplification(rows: Tensor, columns: Tensor) -> float:
    """How much larger than orthonormal rows the turned ones are, in the worst block."""
    return max(float(torch.linalg.svdvals(block[:, columns]).min().reciprocal()) for block in rows)


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

    def leave_identities(self, known: Known) -> None:
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

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        own, heads = self.own_site(), self.heads()
        self.leave_identities(known)
        if any(s.gain is not None or s.role not in ("out", "in") for s in self.sites):
            raise NotDone("a factor per channel stands inside the head")
        if len({len(h) for h in heads}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, h) for h in heads]
        columns = self.columns(weight, rows, known.lost_columns(self.target))
        blocks = [weight[r][:, columns].clone() for r in rows]
        inverses = [torch.linalg.inv(block) for block in blocks]
        actions = []
        for site in self.sites:
            matrices = inverses if site.role == "out" else [block.T for block in blocks]
            mine = [
                (places_of(site, head, copy), matrix)
                for head, matrix in zip(heads, matrices, strict=True)
                for copy in copies_of(site, head)
            ]
            actions.append((site, mine))
        self.turn(tensors, actions)
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
        return [m for parts in by_head(self.claim.parts) for m in free_part(parts)]

    def heads(self) -> list[list[int]]:
        return [m.keys for m in self.meetings()]

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        own, meetings = self.own_site(), self.meetings()
        self.leave_identities(known)
        if any(s.gain is not None or s.role != "out" for s in self.sites):
            raise NotDone("a factor per channel stands inside the head")
        if len({len(m.keys) for m in meetings}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, m.keys) for m in meetings]
        columns = self.columns(weight, rows, known.lost_columns(self.target))
        blocks = [weight[r][:, columns].clone() for r in rows]
        actions = []
        for site in self.sites:
            here = set(site.coordinate.tolist())
            mine = [
                (places_of(site, coordinates), matrix)
                for meeting, block in zip(meetings, blocks, strict=True)
                for coordinates, matrix in turns(meeting, block)
                if here.issuperset(coordinates)
            ]
            actions.append((site, mine))
        self.turn(tensors, actions)
        return self.finish(tensors, rows, columns)


def turns(meeting: Meeting, block: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """What is done to the keys of a head, and to the queries of every head that meets them."""
    yield meeting.keys, torch.linalg.inv(block)
    turn = (meeting.map @ block @ torch.linalg.inv(meeting.map)).T
    for queries in meeting.queries:
        yield queries, turn


def free_part(parts: list[HeadPart]) -> Iterator[Meeting]:
    """The coordinates of a key head that may be mixed at will: all without rotary positions, else the unrotated."""
    single = [p for p in parts if p.keys.shape[1] == 1]
    if single:
        widest = max(single, key=lambda p: p.part.count)
        scales = 1 / widest.part.right_basis[:, 0, 0]  # W = M₀₁/M₀
        yield Meeting(widest.right.tolist(), [q.tolist() for q in widest.left], torch.diag(scales))


def by_head(parts: Iterable[HeadPart]) -> list[list[HeadPart]]:
    """The parts of every key head: parts of one head share the query heads, and follow each other."""
    heads: list[list[HeadPart]] = []
    for part in parts:
        if heads and heads[-1][0].head == part.head:
            heads[-1].append(part)
        else:
            heads.append([part])
    return heads


@dataclass(frozen=True, kw_only=True)
class WholeProjection(BasisRewrite):
    """x ← Θx with Θ the projection itself, which becomes the identity."""

    claim: TurnClaim

    def heads(self) -> list[list[int]]:
        site = self.reader()
        return [sorted(set(site.coordinate.tolist()) - {0})]

    def milder(self) -> Iterator[Rewrite]:
        yield from ()  # the whole matrix or none of it

    def reader(self) -> Site:
        return next(s for s in self.sites if s.parameter == self.claim.node and s.role == "in")

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        site = self.reader()
        theta = tensors[self.target].movedim(site.axis, 1).clone()
        condition = float(torch.linalg.cond(theta))
        if not condition < self.growth:
            raise NotDone(f"the projection has condition number {condition:.0f}; it would cost precision")
        if any(s.gain is not None or s.role not in ("out", "in") for s in self.sites):
            raise NotDone("a factor per channel stands on the stream")
        (stream,) = self.heads()
        inverse_theta = torch.linalg.inv(theta).T
        actions = []
        for s in self.sites:
            matrix = theta if s.role == "out" else inverse_theta
            actions.append((s, [(places_of(s, stream, copy), matrix) for copy in copies_of(s, stream)]))
        self.turn(tensors, actions)
        size = len(stream)
        tensors[self.target] = torch.eye(size, dtype=torch.float64)
        every = tuple(range(size))
        return [IdentityBlocks(self.target, 1 - site.axis, (every,), every, whole=True)]
