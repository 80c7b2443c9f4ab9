"""How many dimensions a gauge makes redundant: those of its group, less those of the turns that move nothing.

A turn X moves a writer A by X·A and a reader B by −B·X. It moves neither if it ends all that is written and makes only
what nothing reads: of n² dimensions (n − rank A)(n − rank B) go, of rotations those of what is neither written nor
read. Ranks are generic, min(n, columns), over all writers (a bias is one column) and all readers; queries are read by
keys. A direction that another law has taken (a bias that folds, a dead mean) is no column any more. A weight that reads
one block and writes another moves by X_j·A − A·X_i: blocks linked so are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.contraction_claim import ContractionClaim
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph
from deadweight.proof.basis import Site
from deadweight.search.taken import Taken

LARGEST = (
    1000  # unknowns of linked blocks that are solved for; beyond, their turns are counted as if each moved nothing
)
ZERO = 1e-9  # singular values of random equations: rounding leaves about 1e-15
GAP = 1e3  # between the smallest that counts and the largest that does not


@dataclass(eq=False)
class Block:
    """Coordinates that one matrix mixes; its entries have `entry` dimensions (2 for rotary planes)."""

    claim: int  # its place among the claims
    size: int
    rotations: bool = False
    entry: int = 1
    places: list[Place] = field(default_factory=list)


@dataclass(eq=False)
class Place:
    """A parameter that writes or reads a whole block: so many `columns` (rows, for a reader), free of other laws."""

    block: Block
    site: Site
    writes: bool  # in the block's own sense: keys read the queries
    index: Tensor  # along the site's axis
    columns: int
    copies: int  # of the block along the site's axis
    unit: int  # stored numbers per dimension of the block
    links: list[tuple[Place, int]] = field(default_factory=list)  # on the parameter's other side: for so many slices


Ranks = dict[tuple[Block, bool], int]


def without_stabilisers(graph: Graph, claims: Sequence[Claim]) -> list[Claim]:
    """The same claims, each counting only what it moves and no other claim has counted."""
    taken = Taken(claims)
    claims = [c for c in claims if not moves_only(c, taken.whole)]
    blocks = [block for i, claim in enumerate(claims) for block in blocks_of(graph, i, claim, taken)]
    link(graph, blocks)
    lost = [ended_coordinates(graph, claim, taken) for claim in claims]
    for block, dimensions in kernel(blocks).items():
        lost[block.claim] += dimensions
    counted = [replace(c, dof=c.dof - n) if n else c for c, n in zip(claims, lost, strict=True)]
    return [c for c in counted if c.dof > 0]


def moves_only(claim: Claim, taken: Set[str]) -> bool:
    """Whether a gauge moves nothing but parameters that other claims have taken element by element."""
    if not isinstance(claim, (TurnClaim, ContractionClaim)):
        return False
    return {site.parameter for site in claim.sites} <= taken


def ended_coordinates(graph: Graph, claim: Claim, taken: Taken) -> int:
    """How many coordinates a gauge scales alone although all that they are written and read with is claimed already."""
    if not isinstance(claim, TurnClaim) or claim.scalar:
        return 0
    shapes = [graph.nodes[site.parameter].shape for site in claim.sites]
    weights = [site.parameter for site, shape in zip(claim.sites, shapes, strict=True) if len(shape) > 1]
    if not any(name in taken.single for name in weights):
        return 0
    moved = [s.coordinate[taken.moves(s, shape)] for s, shape in zip(claim.sites, shapes, strict=True)]
    present = torch.cat([s.coordinate.reshape(-1) for s in claim.sites]).unique()
    present = present[present != 0]
    _, place, counts = claim.blocks[present].unique(return_inverse=True, return_counts=True)
    return int((~torch.isin(present[counts[place] == 1], torch.cat(moved))).sum())


def blocks_of(graph: Graph, number: int, claim: Claim, taken: Taken) -> Iterator[Block]:
    """The blocks of a gauge that are wider than one; of single coordinates see `ended_coordinates`."""
    if isinstance(claim, ContractionClaim):
        for part in claim.parts:
            if part.part.count > 1:
                block = Block(number, part.part.count, part.allowed is not None, entry=part.part.entry)
                settle(block, graph, claim.sites, part.left, taken, writes=True, grain=part.part.grain)
                settle(block, graph, claim.sites, (part.right,), taken, writes=False, grain=part.part.grain)
                yield block
    elif isinstance(claim, TurnClaim) and not claim.scalar and not any(s.role == "gain" for s in claim.sites):
        present = torch.cat([s.coordinate.reshape(-1) for s in claim.sites]).unique()
        present = present[present != 0]
        numbers, counts = claim.blocks[present].unique(return_counts=True)
        for block_number in numbers[counts > 1]:
            members = present[claim.blocks[present] == block_number]
            block = Block(number, len(members) - int(claim.fixes_ones), claim.rotations)
            settle(block, graph, claim.sites, (members,), taken)
            yield block


def settle(
    block: Block,
    graph: Graph,
    sites: Sequence[Site],
    members: Sequence[Tensor],
    taken: Taken,
    *,
    writes: bool | None = None,
    grain: int = 1,
) -> None:
    """Note every place where a parameter writes or reads all of the block, in as many copies as there are."""
    for site in sites:
        inside = [torch.isin(site.coordinate, m) for m in members]
        copies = sum(int(found.sum()) // len(m) for found, m in zip(inside, members, strict=True))
        if not copies:
            continue
        index = torch.stack(inside).any(0).nonzero().reshape(-1)
        shape = graph.nodes[site.parameter].shape
        others = torch.Size(shape).numel() // shape[site.axis] - taken.directions(site, index, shape)
        side = site.role != "in" if writes is None else writes
        unit = max(1, len(members[0]) // block.size)
        block.places.append(Place(block, site, side, index, max(0, others) * grain, copies, unit))


def link(graph: Graph, blocks: list[Block]) -> None:
    """Note for every place what is turned on the other side of its parameter."""
    by_parameter: dict[str, list[Place]] = {}
    for block in blocks:
        for place in block.places:
            by_parameter.setdefault(place.site.parameter, []).append(place)
    for parameter, places in by_parameter.items():
        shape = graph.nodes[parameter].shape
        for place in places:
            for other in places:
                a, b = place.site, other.site
                if a.axis != b.axis:
                    slices = torch.Size(shape).numel() // (shape[a.axis] * shape[b.axis])
                    place.links.append((other, slices))


def kernel(blocks: list[Block]) -> dict[Block, int]:
    """For every block the dimensions of its turns that move nothing, or nothing that is not counted elsewhere."""
    still: set[Block] = set()  # no turn that moves nothing turns these
    while True:
        rank = ranks(blocks, still)
        moving = [b for b in blocks if alone(b, rank)]
        if len(moving) + len(still) == len(blocks):
            break
        still = set(blocks) - set(moving)
    result: dict[Block, int] = {}
    for group in connected(moving):
        left = together(group, still, sum(alone(b, rank) for b in group))
        for block in group:
            result[block] = min(left, alone(block, rank))
            left -= result[block]
    return result


def alone(block: Block, rank: Ranks) -> int:
    """The most turns of one block that can move nothing."""
    written, read = rank[block, True], rank[block, False]
    if block.rotations:
        free = max(0, block.size - written - read)
        return free * (free - 1) // 2
    return block.entry * (block.size - written) * (block.size - read)


def ranks(blocks: list[Block], still: set[Block]) -> Ranks:
    """How much of each block is written and read, straight or through other blocks: the least solution."""
    result = {(b, side): 0 for b in blocks for side in (True, False)}
    while True:
        new = {
            (b, side): min(b.size, sum(seen(p, result, still) for p in b.places if p.writes == side))
            for b, side in result
        }
        if new == result:
            return result
        result = new


def seen(place: Place, rank: Ranks, still: set[Block]) -> int:
    """The columns of a place; where a block that may turn stands on the other side, only as many as its rank."""
    hidden = 0
    for other, slices in place.links:
        if other.block not in still:
            hidden += slices * (len(other.index) - other.copies * other.unit * rank[other.block, not other.writes])
    return place.copies * max(0, place.columns - hidden)


def connected(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks that some weight links, directly or through others."""
    left = dict.fromkeys(blocks)
    while left:
        group, stack = [], [next(iter(left))]
        while stack:
            block = stack.pop()
            if block in left:
                del left[block]
                group.append(block)
                stack += [other.block for p in block.places for other, _ in p.links]
        yield sorted(group, key=blocks.index)


def together(group: list[Block], still: set[Block], most: int) -> int:
    """The turns of linked blocks that move nothing, at random weights; `most` where that is too much to solve for.

    Of rotations there are no more than of all turns, which are solved for.
    """
    links = [(other, place, n) for block in group for place in block.places for other, n in place.links if place.writes]
    links = [(source, target, n) for source, target, n in links if source.block not in still]
    sizes = [source.block.size * target.block.size for source, target, _ in links]
    if not links or most > LARGEST or max(sizes) > LARGEST or any(b.entry > 1 for b in group):
        return most
    generator = torch.Generator().manual_seed(0)
    ends = {block: both_ends(block, still, generator) for block in group}
    rows = []
    for source, target, slices in links:
        for _ in range(slices * source.copies * target.copies):
            weight = torch.randn(target.block.size, source.block.size, generator=generator, dtype=torch.float64)
            rows.append(equation(ends, source.block, target.block, weight))
    rank = certain_rank(torch.cat(rows))
    return most if rank is None else rows[0].shape[1] - rank


def certain_rank(matrix: Tensor) -> int | None:
    """The rank, where a wide gap parts the singular values that count from those that rounding leaves; else None."""
    values = torch.linalg.svdvals(matrix)
    live = int((values > ZERO * values[0]).sum()) if len(values) and float(values[0]) else 0
    if 0 < live < len(values) and float(values[live]) * GAP > float(values[live - 1]):
        return None
    return live


Ends = dict[Block, tuple[Tensor, Tensor]]


def both_ends(block: Block, still: set[Block], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """N and K such that X = N·Z·K are the turns that end what is written straight, and make what nothing reads so."""
    ends = []
    for side in (False, True):
        fixed = sum(unlinked(p, still) for p in block.places if p.writes == side)
        frame = torch.randn(block.size, min(block.size, fixed), generator=generator, dtype=torch.float64)
        ends.append(torch.linalg.qr(frame, mode="complete")[0][:, frame.shape[1] :])
    return ends[0], ends[1].T


def unlinked(place: Place, still: set[Block]) -> int:
    """The columns of a place behind which nothing turns."""
    turned = sum(slices * len(other.index) for other, slices in place.links if other.block not in still)
    return place.copies * max(0, place.columns - turned)


def equation(ends: Ends, source: Block, target: Block, weight: Tensor) -> Tensor:
    """X_target·A − A·X_source, entry by entry, as rows over all unknown Z."""
    parts = []
    for block, (out, into) in ends.items():
        part = torch.zeros(*weight.shape, out.shape[1], into.shape[0], dtype=torch.float64)
        if block is target:
            part += torch.einsum("ia,bj->ijab", out, into @ weight)
        if block is source:
            part -= torch.einsum("ia,bj->ijab", weight @ out, into)
        parts.append(part.flatten(2).flatten(0, 1))
    return torch.cat(parts, 1)
