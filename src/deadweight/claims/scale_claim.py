"""A factor per channel behind a linear map: the map's own rows can do what the factor does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, normal
from deadweight.claims.point import Motion, Point, Values


@dataclass(frozen=True, kw_only=True)
class ScaleClaim(Claim):
    """γ·(a·(Wx + b) + k) + β: row c of W and b times s, γ_c over s, and β_c takes up what k loses.

    `node` is γ's parameter and `factor` the node of its value (they differ where γ = 1 + w).
    """

    weight: str
    output: int  # the weight's axis of channels
    biases: tuple[str, ...]
    factor: str
    product: str  # the node that multiplies by γ
    channel: int  # its axis of channels
    shift: str | None  # β's parameter; None where nothing constant is added before γ

    def motions(self, point: Point) -> Iterator[Motion]:
        for c in range(self.dof):
            yield self.scaled(point, torch.eye(self.dof, dtype=torch.float64)[c])

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.scaled(point, normal(generator, self.dof))

    def scaled(self, point: Point, rates: Tensor) -> Motion:
        """Channel c grows at its rate."""
        gain = point.value(self.factor).reshape(-1)
        motion: Motion = {self.weight: point.values[self.weight] * self.along_channels(point, rates)}
        motion |= {b: point.values[b] * rates for b in self.biases}
        motion[self.node] = -(gain * rates).reshape(point.values[self.node].shape)
        if self.shift is not None:
            motion[self.shift] = (self.offset(point) * rates).reshape(point.values[self.shift].shape)
        return motion

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """Every channel times a factor of its own, undone in the gain."""
        s = torch.rand(self.dof, generator=generator, dtype=torch.float64) + 0.5
        values, gain = point.values, point.value(self.factor).reshape(-1)
        moved = {self.weight: values[self.weight] * self.along_channels(point, s)}
        moved |= {bias: values[bias] * s for bias in self.biases}
        moved[self.node] = values[self.node] + (gain / s - gain).reshape(values[self.node].shape)
        if self.shift is not None:
            taken = self.offset(point) * (1 - 1 / s)
            moved[self.shift] = values[self.shift] + taken.reshape(values[self.shift].shape)
        return moved

    def along_channels(self, point: Point, factors: Tensor) -> Tensor:
        return factors.reshape([-1 if a == self.output else 1 for a in range(point.values[self.weight].ndim)])

    def offset(self, point: Point) -> Tensor:
        """γ·k: what the product is, per channel, when the linear map and its biases give nothing."""
        linear = point.graph.nodes[self.steps[0].node]
        silent = point.at({b: torch.zeros_like(point.values[b]) for b in self.biases})
        nothing = torch.zeros(linear.shape, dtype=torch.float64)
        constant = silent.value(self.product, {linear.name: nothing}).movedim(self.channel, 0)
        return constant.reshape(constant.shape[0], -1)[:, 0]
