"""DW012 across a slice: where a reader sees only some channels, what it does not see there may turn with the others.

Let W read the channels S of a stream, W·x[S], and let V be the vectors of the stream that W maps to 0. A rotation Q
that keeps every vector orthogonal to V keeps the rows of W, so W·(Qx)[S] = W·x[S]: that reader need not move at all,
whatever its weights are, and the readers of the whole stream undo Q as always. V depends on W, so the rotations that
are allowed do too: they are no subgroup that shapes alone would name, but their dimension follows from shapes.

Slices must lie within each other, S₁ ⊂ S₂ ⊂ …; blocks B₁ = S₁, B₂ = S₂ − S₁, …, and the rest. At level k the first
k + 1 blocks turn, and the readers of the first k slices, with ρ independent rows in all, see n = |S_k| channels. The
rotations within blocks (counted by residual-basis itself) aside, these are |B_{k+1}|·(n − ρ) dimensions, for a block
turns against every direction of S_k that none of these readers sees. Where LayerNorm keeps the vector of ones it is one
less (and not all there is: behind LayerNorm a reader may change by any multiple of the ones as well).
ρ is the rank of generic weights; where it is lower there is only more freedom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.claims.action import Blockwise, direction, transformed
from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.claims.turn_claim import plane
from deadweight.graph.node import Graph
from deadweight.proof.basis import Site, Turned
from deadweight.search.prover import Prover
from deadweight.search.turns import Space, spaces


@dataclass(frozen=True)
class Reader:
    """One copy of the space at a reading parameter: the channels it sees, and its independent rows."""

    site: Site
    copy: int
    channels: frozenset[int]
    n_rows: int

    @property
    def places(self) -> Tensor:
        """The places of its channels along the site's axis, in the order of the channels."""
        here = (copies_of(self.site) == self.copy) & (self.site.coordinate != 0)
        index = here.nonzero().reshape(-1)
        return index[self.site.coordinate[index].argsort()]

    def rows(self, values: Values, size: int) -> Float64[Tensor, "rows n"]:
        """Its weights as rows over all channels: 0 where it sees none."""
        weight = values[self.site.parameter].to(torch.float64).movedim(self.site.axis, 0)
        found = torch.zeros(size, weight[0].numel(), dtype=torch.float64)
        found[torch.tensor(sorted(self.channels)) - 1] = weight[self.places].flatten(1)
        return found.T


@dataclass(frozen=True)
class Level:
    """Channels that turn together but for the rows of the readers that stay, and the sites that move."""

    channels: Tensor  # of the first blocks, sorted
    staying: tuple[Reader, ...]
    rank: int  # of their rows
    sites: tuple[Site, ...]
    dof: int


@dataclass(frozen=True, kw_only=True)
class UnseenTurnClaim(Claim):
    """At every level the rotations of the vectors that the staying readers map to 0."""

    size: int
    levels: tuple[Level, ...]
    fixes_ones: bool = False

    def motions(self, point: Point) -> Iterator[Motion]:
        for level in self.levels:
            frame = self.frame(level, point)
            for a in range(frame.shape[1]):
                for b in range(a + 1, frame.shape[1]):
                    part = plane(level.channels[None], frame[:, [a]], frame[:, [b]], rotations=True)
                    yield direction(level.sites, (part,), point.values, point.value)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        motion: Motion = {}
        for level in self.levels:
            a, b = self.random_vectors(level, point, generator)
            part = plane(level.channels[None], a, b, rotations=True)
            for name, t in direction(level.sites, (part,), point.values, point.value).items():
                motion[name] = motion[name] + t if name in motion else t
        return motion

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """Two reflections at every level, each level at the parameters that those before it have moved."""
        moved: Values = {}
        for level in self.levels:
            here = point.at(moved)
            a, b = (x / x.norm() for x in self.random_vectors(level, here, generator))
            angle = (a * b).sum()
            u, v = torch.cat([a, b], 1), torch.cat([4 * angle * b - 2 * a, -2 * b], 1)
            part = Blockwise(level.channels[None], u[None], v[None])
            moved |= transformed(level.sites, (part,), here.values, here.value)
        return moved

    def frame(self, level: Level, point: Point) -> Float64[Tensor, "n unseen"]:
        """An orthonormal basis of the channels' vectors that no staying reader sees, and that are orthogonal to ones.

        The rows have at most `rank` independent directions, so the last right singular vectors are orthogonal to all.
        """
        rows = [reader.rows(point.values, self.size)[:, level.channels - 1] for reader in level.staying]
        fixed = torch.cat([*rows, torch.ones(int(self.fixes_ones), len(level.channels), dtype=torch.float64)])
        return torch.linalg.svd(fixed, full_matrices=True)[2][level.rank + int(self.fixes_ones) :].T

    def random_vectors(self, level: Level, point: Point, generator: torch.Generator) -> list[Tensor]:
        frame = self.frame(level, point)
        return [frame @ normal(generator, frame.shape[1], 1) / frame.shape[1] ** 0.5 for _ in range(2)]


def find_unseen_turns(prover: Prover, law: Title) -> Iterator[UnseenTurnClaim]:
    for space in spaces(prover):
        levels = levels_of(prover.graph, space)
        if levels:
            moved = dict.fromkeys(site.parameter for level in levels for site in level.sites)
            node = space.writers.sites[0].parameter
            yield UnseenTurnClaim(
                law=law,
                node=node,
                dof=sum(level.dof for level in levels),
                verdict="gauge",
                into=tuple(name for name in moved if name != node),
                axis=space.writers.sites[0].axis,
                steps=tuple(space.turned.steps),
                note="directions that the readers of single channels do not see turn with the other channels",
                size=space.turned.size,
                levels=tuple(levels),
                fixes_ones=space.turned.fixes_ones,
            )


def levels_of(graph: Graph, space: Space) -> list[Level]:
    """The levels that have something to turn; none where slices overlap, or anything but reading splits the stream."""
    turned = space.turned
    if not turned.proved or not turned.rotations or turned.pointwise or turned.powers or space.of_experts:
        return []
    every = frozenset(range(1, turned.size + 1))
    readers = [r for site in turned.sites if site.role == "in" for r in readers_at(graph, site)]
    partial = [r for r in readers if r.channels != every]
    slices = sorted({r.channels for r in partial}, key=len)
    nested = all(a < b for a, b in zip(slices, [*slices[1:], every], strict=False))
    writing = [site for site in turned.sites if site.role != "in"]
    whole = all(site.role == "out" and sorted(site.coordinate.tolist()) == sorted(every) for site in writing)
    plain = all(r.site.gain is None for r in partial)
    if not slices or not nested or not whole or not plain:
        return []
    if columns(graph, writing) + sum(r.n_rows for r in readers if r.channels == every) < turned.size:
        return []  # some turns move nothing: how many is not worked out here
    found = [level(graph, turned, readers, [*slices[: k + 1], [*slices, every][k + 1]]) for k in range(len(slices))]
    return [one for one in found if one.dof > 0]


def readers_at(graph: Graph, site: Site) -> Iterator[Reader]:
    shape = graph.nodes[site.parameter].shape
    for copy in copies_of(site)[site.coordinate != 0].unique().tolist():
        channels = site.coordinate[(copies_of(site) == copy) & (site.coordinate != 0)].tolist()
        assert len(set(channels)) == len(channels), "a copy has a coordinate twice"
        yield Reader(site, copy, frozenset(channels), torch.Size(shape).numel() // shape[site.axis])


def copies_of(site: Site) -> Tensor:
    return torch.zeros_like(site.coordinate) if site.copy is None else site.copy


def columns(graph: Graph, sites: list[Site]) -> int:
    """How many vectors these sites write."""
    shapes = [(graph.nodes[s.parameter].shape, s.axis) for s in sites]
    return sum(torch.Size(shape).numel() // shape[axis] for shape, axis in shapes)


def level(graph: Graph, turned: Turned, readers: list[Reader], slices: list[frozenset[int]]) -> Level:
    """The channels of the last slice turn; those who read all of them move, and those who read fewer stay."""
    inner, channels = slices[-2], slices[-1]
    staying = tuple(r for r in readers if r.channels < channels)
    rank = 0
    for one in slices[:-1]:  # each slice holds the ones before it: rows add up until they fill it
        rank = min(len(one), rank + sum(r.n_rows for r in staying if r.channels == one))
    free = len(inner) - rank
    dof = (len(channels) - len(inner)) * free - int(turned.fixes_ones and free > 0)
    sites = [without_copies(s, [r.copy for r in staying if r.site is s]) for s in turned.sites]
    moving = tuple(s for s in sites if bool((s.coordinate != 0).any()))
    return Level(torch.tensor(sorted(channels)), staying, rank, moving, dof)


def without_copies(site: Site, copies: list[int]) -> Site:
    """The site without those of its copies that stay as they are."""
    if not copies:
        return site
    stays = torch.isin(copies_of(site), torch.tensor(copies))
    return replace(site, coordinate=torch.where(stays, 0, site.coordinate))
