"""How a change of basis acts on parameters, block of coordinates by block of coordinates.

A member of a gauge group is A = 1 + U·Vᵀ on each block, a direction of its Lie algebra X = U·Vᵀ. Blocks of one size are
kept together, so acting on a parameter costs as much as reading it, whatever the width of the space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from deadweight.claims.point import Motion
from deadweight.proof.basis import Site

LOT = 1 << 21  # elements of a parameter that are changed at a time
Value = Callable[[str], Tensor]  # a node that depends on parameters alone, to its value


@dataclass(frozen=True)
class Blockwise:
    """U·Vᵀ on every block: `index` holds the blocks' coordinates."""

    index: Int64[Tensor, "blocks n"]
    u: Float64[Tensor, "blocks n r"]
    v: Float64[Tensor, "blocks n r"]

    @classmethod
    def dense(cls, index: Tensor, matrix: Float64[Tensor, "blocks n n"]) -> Blockwise:
        return cls(index, matrix, torch.eye(matrix.shape[-1], dtype=torch.float64).expand_as(matrix))

    @cached_property
    def inverse(self) -> Blockwise:
        """The same for (1 + U·Vᵀ)⁻¹ = 1 − U·(1 + Vᵀ·U)⁻¹·Vᵀ."""
        small = torch.eye(self.u.shape[-1], dtype=torch.float64) + self.v.transpose(1, 2) @ self.u
        return Blockwise(self.index, -torch.linalg.solve(small, self.u, left=False), self.v)

    def raised(self, power: int, *, finite: bool) -> Blockwise:
        """For single coordinates: (1 + x)ⁿ − 1 of a member, n·x of a direction."""
        assert self.index.shape[1] == 1, "a power of more than a scale"
        x = self.diagonal[..., None]
        return Blockwise(self.index, (1 + x) ** power - 1 if finite else power * x, torch.ones_like(x))

    @property
    def diagonal(self) -> Float64[Tensor, "blocks n"]:
        return (self.u * self.v).sum(-1)


Element = tuple[Blockwise, ...]


def direction(sites: Sequence[Site], element: Element, values: dict[str, Tensor], value: Value) -> Motion:
    """How every parameter moves along X: writers by X·p, readers by −p·X."""
    motion: Motion = {}
    for site in sites:
        moved = site_change(site, element, values[site.parameter].to(torch.float64), value, reader_sign=-1.0)
        motion[site.parameter] = motion[site.parameter] + moved if site.parameter in motion else moved
    return motion


def transformed(sites: Sequence[Site], element: Element, values: dict[str, Tensor], value: Value) -> dict[str, Tensor]:
    """Every parameter that moves, after A: written A·p, read p·A⁻¹."""
    moved: dict[str, Tensor] = {}
    inverse = tuple(part.inverse for part in element)
    for site in sites:
        parameter = moved.get(site.parameter, values[site.parameter])
        side = inverse if site.role == "in" else element
        moved[site.parameter] = parameter + site_change(site, side, parameter, value)
    return moved


def site_change(site: Site, element: Element, parameter: Tensor, value: Value, reader_sign: float = 1.0) -> Tensor:
    """U·Vᵀ applied where the space meets a parameter: along the site's axis, copy by copy."""
    if site.role == "gain":
        assert site.value is not None
        return (value(site.value).reshape(-1) * diagonal_of(site, element)).reshape(parameter.shape)
    along = along_space(site, parameter)
    change = torch.zeros_like(along)
    gain = None if site.gain is None else value(site.gain).reshape(-1)
    if gain is not None and site.role == "behind":
        gain = 1 / gain
    for part in element:
        part = part if site.power == 1 else part.raised(site.power, finite=reader_sign == 1.0)
        for places, blocks in few_at_a_time(blocks_at(site, part.index), along):
            g = None if gain is None else gain[places][..., None]
            u, v = acting_factors(site, part, blocks, g, reader_sign)
            slices = along[places].reshape(*places.shape, -1)  # blocks × n × rest
            moved = u @ (v.transpose(1, 2) @ slices)
            change.index_add_(0, places.reshape(-1), moved.reshape(-1, *along.shape[1:]))
    if site.expert is None:
        return change.movedim(0, site.axis)
    return change.unflatten(0, (parameter.shape[site.expert], -1)).movedim((0, 1), (site.expert, site.axis))


def few_at_a_time(pairs: Iterable[tuple[Tensor, Tensor]], along: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same blocks in smaller lots: what one lot reads is copied, and a weight may be large."""
    row = max(along.shape[1:].numel(), 1)
    for places, blocks in pairs:
        lot = max(1, LOT // (row * places.shape[1]))
        yield from zip(places.split(lot), blocks.split(lot), strict=True)


def along_space(site: Site, parameter: Tensor) -> Tensor:
    """The parameter with the site's axis first; with experts, their axis and then the site's, as one."""
    if site.expert is None:
        return parameter.movedim(site.axis, 0)
    return parameter.movedim((site.expert, site.axis), (0, 1)).flatten(0, 1)


def acting_factors(
    site: Site, part: Blockwise, blocks: Tensor, gain: Tensor | None, reader_sign: float
) -> tuple[Tensor, Tensor]:
    """U and V of these blocks as they act on the site's axis; through a gain g: diag(g)·U·Vᵀ·diag(g)⁻¹."""
    u, v = part.u[blocks], part.v[blocks]
    if site.role == "in":
        u, v = reader_sign * v, u
    if gain is not None:
        u, v = (u / gain, v * gain) if site.role == "in" else (u * gain, v / gain)
    return u, v


def blocks_at(site: Site, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each copy of the space at a site: the places of the blocks that stand there, and which blocks they are."""
    if site.coordinate.ndim != 1:
        raise AssertionError(site)
    copies = torch.zeros_like(site.coordinate) if site.copy is None else site.copy
    size = int(max(index.max(), site.coordinate.max())) + 1
    inside = site.coordinate != 0
    for copy in copies[inside].unique().tolist():
        here = (inside & (copies == copy)).nonzero().reshape(-1)
        place = torch.full((size,), -1, dtype=torch.int64)
        place[site.coordinate[here]] = here
        places = place[index]
        whole = (places >= 0).all(1)
        assert bool(((places < 0).all(1) | whole).all()), "a block is torn"
        if bool(whole.any()):
            yield places[whole], whole.nonzero().reshape(-1)


def diagonal_of(site: Site, element: Element) -> Tensor:
    """For a gain: the change of scale at every index of the site's axis."""
    size = max([int(part.index.max()) for part in element] + [int(site.coordinate.max())]) + 1
    scales = torch.zeros(size, dtype=torch.float64)
    for part in element:
        scales[part.index] = part.diagonal
    return scales[site.coordinate]
