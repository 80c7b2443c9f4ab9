"""Claims proved by turning a space, and the motions of parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Graph
from deadweight.laws.claim import Claim, Motion
from deadweight.laws.shift_claim import node_value
from deadweight.proof.turn import Site

Values = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TurnClaim(Claim):
    """A group acts on a space; every site moves along. `blocks` numbers the coordinates that may mix (0 unused)."""

    sites: tuple[Site, ...]
    blocks: Tensor
    rotations: bool = False
    fixes_ones: bool = False
    scalar: bool = False

    def motions(self, graph: Graph, values: Values, inputs: Values) -> Iterator[Motion]:
        if self.scalar:
            yield scaling(self.sites, graph, values, inputs)
            return
        for generator in self.generators():
            yield act(self.sites, generator, graph, values, inputs)

    def generators(self) -> Iterator[Tensor]:
        """A basis of the Lie algebra, as matrices over coordinates 0 … D (row and column 0 are empty)."""
        size = len(self.blocks)
        present = sorted({int(c) for s in self.sites for c in s.coordinate.reshape(-1)} - {0})
        for block in self.blocks[present].unique().tolist():
            members = [c for c in present if int(self.blocks[c]) == block]
            yield from block_generators(size, members, rotations=self.rotations, fixes_ones=self.fixes_ones)


def block_generators(size: int, members: list[int], *, rotations: bool, fixes_ones: bool) -> Iterator[Tensor]:
    """GL(n): all matrix units. Rotations: antisymmetric ones, within the complement of all-ones if that is fixed."""
    frame = torch.zeros(size, len(members), dtype=torch.float64)
    frame[members, range(len(members))] = 1.0
    if fixes_ones:
        frame = frame @ complement_of_ones(len(members))
    n = frame.shape[1]
    for a in range(n):
        for b in range(a + 1 if rotations else 0, n):
            unit = torch.outer(frame[:, a], frame[:, b])
            yield unit - unit.T if rotations else unit


def complement_of_ones(n: int) -> Tensor:
    """An orthonormal basis of the vectors that sum to zero."""
    square = torch.eye(n, dtype=torch.float64)
    square[:, 0] = 1.0
    return torch.linalg.qr(square)[0][:, 1:]


def act(sites: tuple[Site, ...], generator: Tensor, graph: Graph, values: Values, inputs: Values) -> Motion:
    """How each site's parameter moves when the space turns by the generator."""
    motion: Motion = {}
    for site in sites:
        moved = site_motion(site, generator, graph, values, inputs)
        motion[site.parameter] = motion[site.parameter] + moved if site.parameter in motion else moved
    return motion


def scaling(sites: tuple[Site, ...], graph: Graph, values: Values, inputs: Values) -> Motion:
    """Writers grow, readers shrink, each in proportion to itself."""
    motion: Motion = {}
    for site in sites:
        value = values[site.parameter] if site.value is None else node_value(graph, values, inputs, site.value)
        value = value.reshape(values[site.parameter].shape).movedim(site.axis, -1) * (site.coordinate != 0)
        value = (value if site.role != "in" else -value).movedim(-1, site.axis)
        motion[site.parameter] = motion[site.parameter] + value if site.parameter in motion else value.clone()
    return motion


def site_motion(site: Site, generator: Tensor, graph: Graph, values: Values, inputs: Values) -> Tensor:
    parameter = values[site.parameter].to(torch.float64)
    if site.role == "gain":
        assert site.value is not None
        scales = torch.diagonal(generator)[site.coordinate]
        return (node_value(graph, values, inputs, site.value).reshape(-1) * scales).reshape(parameter.shape)
    matrix = generator[site.coordinate][:, site.coordinate]
    if site.copy is not None:
        matrix = matrix * (site.copy[:, None] == site.copy[None, :])
    if site.gain is not None:
        gain = node_value(graph, values, inputs, site.gain).reshape(-1)
        gain = 1 / gain if site.role == "behind" else gain
        matrix = matrix * gain[:, None] / gain[None, :]
    along = parameter.movedim(site.axis, -1)
    moved = -along @ matrix if site.role == "in" else along @ matrix.T
    return moved.movedim(-1, site.axis)
