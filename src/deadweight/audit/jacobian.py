"""Rows of the Jacobian: how random sums of the outputs depend on each parameter, in float64.

A row is the gradient of a random sum of all outputs of one draw of inputs. Rows of single outputs would repeat each
other: the first position of a causal model is the same function in every draw that begins with the same token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.audit.evidence import ROUNDING, ordinary_size
from deadweight.claims.point import Values
from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import evaluate, real_outputs
from deadweight.graph.node import Graph

Draw = Callable[[int], Values]  # seed to fresh inputs
LEAST_DRAWS = 16  # of inputs, however few rows are asked for
SUMS = 1_000_000_007  # first seed of the random sums, far from the seeds of inputs: the two must be independent
SHARE = 3  # outputs per row: with one row per output, rows would repeat each other


@dataclass
class JacobianRows:
    """Rows over the parameters in `order`; every call draws fresh inputs, at most `most` in all."""

    graph: Graph
    values: Values
    draw: Draw
    order: list[str]
    most: int
    drawn: int = field(default=0, init=False)

    @property
    def sizes(self) -> list[int]:
        return [self.values[name].numel() for name in self.order]

    def take(self, count: int) -> Float64[Tensor, "rows p"]:
        """At least `count` rows, fewer when the draws are used up; rows that are not finite are left out."""
        blocks: list[Tensor] = [torch.zeros(0, sum(self.sizes), dtype=torch.float64)]
        start, count_taken = self.drawn, 0
        while self.drawn < self.most and (count_taken < count or self.drawn - start < LEAST_DRAWS):
            left = max(1, min(self.most - self.drawn, LEAST_DRAWS - (self.drawn - start)))
            blocks.append(mixed_rows(self, self.drawn, math.ceil(max(count - count_taken, 1) / left)))
            count_taken += len(blocks[-1])
            self.drawn += 1
        return torch.cat(blocks)


def mixed_rows(rows: JacobianRows, seed: int, most: int) -> Float64[Tensor, "rows p"]:
    """Gradients of random sums of the outputs of one draw, at most `most`."""
    leaves = {name: rows.values[name].detach().clone().requires_grad_() for name in rows.order}
    outputs = evaluate(rows.graph, {**rows.values, **leaves}, rows.draw(seed))
    real = [out.reshape(-1) for out in real_outputs(outputs) if out.requires_grad]
    if not real:
        return torch.zeros(1, sum(rows.sizes), dtype=torch.float64)
    flat = torch.cat(real)
    few = min(most, math.ceil(len(flat) / SHARE))
    generator = torch.Generator().manual_seed(SUMS + seed)
    sums = torch.randn(few, len(flat), generator=generator, dtype=torch.float64)
    mixed = gradients_of(flat, leaves, sums)
    if not bool(torch.isfinite(mixed).all()):  # one output without a derivative spoils every sum
        mixed = gradients_of(flat, leaves, torch.eye(len(flat), dtype=torch.float64))
    silent = mixed.abs().amax(1) < ROUNDING * ordinary_size(flat.detach())
    return mixed.masked_fill(silent.unsqueeze(1), 0.0)[torch.isfinite(mixed).all(1)]


def gradients_of(flat: Tensor, leaves: Values, sums: Tensor) -> Float64[Tensor, "rows p"]:
    """One row per sum; a parameter that no output depends on has zeros."""
    grads = torch.autograd.grad(
        flat, list(leaves.values()), sums, is_grads_batched=True, allow_unused=True, retain_graph=True
    )
    parts = zip(leaves.values(), grads, strict=True)
    columns = [
        torch.zeros(len(sums), leaf.numel(), dtype=torch.float64) if g is None else g.reshape(len(sums), -1)
        for leaf, g in parts
    ]
    return torch.cat(columns, 1)


def refuse_none(rows: Tensor) -> None:
    if not len(rows):
        raise DeadweightError("redundancy cannot be counted: the derivatives are not finite at random parameters")
