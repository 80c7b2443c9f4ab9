"""Claims about queries and keys that meet in a product, and the motions of parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.action import Blockwise, Element, direction, transformed
from deadweight.claims.claim import Claim, normal
from deadweight.claims.head_parts import HeadPart, by_shape, turn_of
from deadweight.claims.normed_heads import directions
from deadweight.claims.point import Motion, Point, Values
from deadweight.claims.turn_claim import SIZE
from deadweight.proof.basis import Site
from deadweight.proof.commutant import Products


@dataclass(frozen=True, kw_only=True)
class ContractionClaim(Claim):
    """Queries and keys turn against each other."""

    sites: tuple[Site, ...]
    products: tuple[Products, ...]
    diagonal: bool
    parts: tuple[HeadPart, ...] = ()

    def motions(self, point: Point) -> Iterator[Motion]:
        for element in self.basis():
            yield direction(self.sites, element, point.values, point.value)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        scales = [normal(generator) for _ in gain_pairs(self.products)] if self.diagonal else []
        element = gain_scales(self.products, scales) if self.diagonal else self.random(generator, finite=False)
        return direction(self.sites, element, point.values, point.value)

    def member(self, point: Point, generator: torch.Generator) -> Values:
        scales = [torch.rand((), generator=generator, dtype=torch.float64) for _ in gain_pairs(self.products)]
        element = gain_scales(self.products, scales, finite=True) if self.diagonal else self.random(generator, True)
        return transformed(self.sites, element, point.values, point.value)

    def basis(self) -> Iterator[Element]:
        """A basis of the Lie algebra, one direction after the other."""
        if self.diagonal:
            pairs = gain_pairs(self.products)
            for i in range(len(pairs)):
                yield gain_scales(self.products, list(torch.eye(len(pairs), dtype=torch.float64)[i]))
            return
        for part in self.parts:
            for unit in directions(part):
                yield turn_of([part], unit[None], finite=False)

    def random(self, generator: torch.Generator, finite: bool) -> Element:
        """A random direction, or a random member of the group not too far from 1."""
        factors: list[Blockwise] = []
        for alike in by_shape(self.parts):
            size = SIZE / (alike[0].part.count * alike[0].part.entry) ** 0.5 / 2
            drawn = torch.stack([part.random(generator) for part in alike]) * size
            factors += turn_of(alike, drawn, finite=finite)
        return tuple(factors)


def gain_scales(products: tuple[Products, ...], scales: list[Tensor], *, finite: bool = False) -> Element:
    """One scale for each pair of gains that meet: up on the queries' side, down on the keys'."""
    factors = []
    for (left, right), s in zip(gain_pairs(products), scales, strict=True):
        for side, change in ((left, s), (right, 1 / (1 + s) - 1 if finite else -s)):
            index = torch.tensor(side)[:, None]
            factors.append(Blockwise.dense(index, change.expand(len(side), 1, 1)))
    return tuple(factors)


def gain_pairs(products: tuple[Products, ...]) -> list[tuple[list[int], list[int]]]:
    """Gains that any product links belong together: one scale each, up on one side and down on the other."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def top(x: tuple[str, int]) -> tuple[str, int]:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x]
        return x

    for p in products:
        for a, b in p.entries.tolist():
            parent[top(("left", int(p.left[a])))] = top(("right", int(p.right[b])))
    groups: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for side, coordinate in list(parent):
        groups.setdefault(top((side, coordinate)), ([], []))[0 if side == "left" else 1].append(coordinate)
    return list(groups.values())
