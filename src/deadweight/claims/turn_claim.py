"""Claims proved by turning a space, and the motions of parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.action import Blockwise, Element, direction, transformed
from deadweight.claims.claim import Claim, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.proof.basis import Site

SIZE = 0.5  # of U·Vᵀ in a random member 1 + U·Vᵀ: well away from a singular one


@dataclass(frozen=True, kw_only=True)
class TurnClaim(Claim):
    """A group acts on a space; every site moves along. `blocks` numbers the coordinates that may mix (0 unused)."""

    sites: tuple[Site, ...]
    blocks: Tensor
    rotations: bool = False
    fixes_ones: bool = False
    scalar: bool = False

    def motions(self, point: Point) -> Iterator[Motion]:
        if self.scalar:
            yield scaling(self.sites, point, 1.0, -1.0)
            return
        for element in self.basis():
            yield direction(self.sites, element, point.values, point.value)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        if self.scalar:
            return scaling(self.sites, point, 1.0, -1.0)
        parts = [self.random_part(index, generator) for index in self.by_size()]
        return direction(self.sites, tuple(parts), point.values, point.value)

    def member(self, point: Point, generator: torch.Generator) -> Values:
        if self.scalar:
            return scaled(self.sites, point, 1.5)
        parts = [self.random_member(index, generator) for index in self.by_size()]
        return transformed(self.sites, tuple(parts), point.values, point.value)

    def by_size(self) -> list[Tensor]:
        """The blocks, those of one size together: coordinates (blocks, n)."""
        present = torch.cat([s.coordinate.reshape(-1) for s in self.sites]).unique()
        present = present[present != 0]
        order = self.blocks[present].argsort(stable=True)
        sizes = self.blocks[present].unique(return_counts=True)[1].tolist()
        blocks = present[order].split(sizes)
        return [torch.stack([b for b in blocks if len(b) == n]) for n in sorted(set(sizes))]

    def basis(self) -> Iterator[Element]:
        """A basis of the Lie algebra: all matrix units, or antisymmetric ones for rotations."""
        for index in self.by_size():
            frame = self.frame(index.shape[1])
            for block in index:
                for a in range(frame.shape[1]):
                    for b in range(a + 1 if self.rotations else 0, frame.shape[1]):
                        yield (plane(block[None], frame[:, [a]], frame[:, [b]], rotations=self.rotations),)

    def frame(self, n: int) -> Tensor:
        """Orthonormal vectors that may be mixed: all, or those that sum to zero."""
        return complement_of_ones(n) if self.fixes_ones else torch.eye(n, dtype=torch.float64)

    def random_part(self, index: Tensor, generator: torch.Generator) -> Blockwise:
        a, b = (self.random_vectors(index, generator) for _ in range(2))
        return plane(index, a, b, rotations=self.rotations)

    def random_member(self, index: Tensor, generator: torch.Generator) -> Blockwise:
        """1 + U·Vᵀ: two reflections for rotations; else of rank one, not too far from 1; positive for single units.

        A single coordinate has no rotation but 1.
        """
        if index.shape[1] == 1:
            scales = torch.rand((len(index), 1, 1), generator=generator, dtype=torch.float64) - 0.5
            return Blockwise(index, scales * (not self.rotations), torch.ones_like(scales))
        a, b = (self.random_vectors(index, generator) for _ in range(2))
        if not self.rotations:
            return Blockwise(index, SIZE * a, b)
        a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
        angle = (a * b).sum(1, keepdim=True)
        return Blockwise(index, torch.cat([a, b], 2), torch.cat([4 * angle * b - 2 * a, -2 * b], 2))

    def random_vectors(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """One vector of about length 1 for each block."""
        drawn = normal(generator, *index.shape, 1)
        drawn = drawn - drawn.mean(1, keepdim=True) if self.fixes_ones else drawn
        return drawn / index.shape[1] ** 0.5


def plane(index: Tensor, a: Tensor, b: Tensor, *, rotations: bool) -> Blockwise:
    """a·bᵀ, or a·bᵀ − b·aᵀ, on every block."""
    a, b = (x.expand(len(index), -1, -1) for x in (a, b))
    return Blockwise(index, torch.cat([a, b], 2), torch.cat([b, -a], 2)) if rotations else Blockwise(index, a, b)


def complement_of_ones(n: int) -> Tensor:
    """An orthonormal basis of the vectors that sum to zero."""
    square = torch.eye(n, dtype=torch.float64)
    square[:, 0] = 1.0
    return torch.linalg.qr(square)[0][:, 1:]


def scaling(sites: tuple[Site, ...], point: Point, written: float, read: float) -> Motion:
    """Writers grow and readers shrink, each in proportion to itself."""
    motion: Motion = {}
    for site in sites:
        parameter = point.values[site.parameter]
        value = parameter if site.value is None else point.value(site.value).reshape(parameter.shape)
        moved = in_space(site, value) * (read if site.role == "in" else written)
        motion[site.parameter] = motion[site.parameter] + moved if site.parameter in motion else moved
    return motion


def scaled(sites: tuple[Site, ...], point: Point, factor: float) -> Values:
    """Written times the factor, read over it; what does both is scaled twice."""
    moved: Values = {}
    for site in sites:
        before = point.values[site.parameter]
        parameter = moved.get(site.parameter, before)
        offset = 0.0 if site.value is None else point.value(site.value).reshape(before.shape) - before
        change = (1 / factor if site.role == "in" else factor) - 1
        moved[site.parameter] = parameter + change * in_space(site, parameter + offset)
    return moved


def in_space(site: Site, value: Tensor) -> Tensor:
    """The numbers that stand for coordinates of the space, 0 elsewhere."""
    return (value.movedim(site.axis, -1) * (site.coordinate != 0)).movedim(-1, site.axis)
