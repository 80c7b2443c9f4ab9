"""Evidence: gradients in float64, with random parameters and random inputs. It shares no code with the proofs.

One backward pass of a random functional of the output gives the gradient g of every parameter. A motion t that changes
nothing has g·t = 0 up to rounding. A claim is tested along random directions of its whole redundant space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.evaluate import FILL, evaluate, real_outputs
from deadweight.graph.node import Graph

Draw = Callable[[int], Values]
TOLERANCE = 1e-9  # of gradients along a redundant direction: rounding leaves 1e-14, a live direction gives about 1
DRAWS = 4
MANY = 5_000_000  # parameters: from here on fewer draws, for time and memory
DIRECTIONS = 2  # random ones, per claim; one in models of many parameters
ROUNDING = 1e-13  # relative to the outputs: a gradient that is smaller everywhere is zero up to rounding


@dataclass(frozen=True)
class Gradients:
    """Gradients for several draws of inputs, and the root mean square of each."""

    draws: tuple[Values, ...]
    typical: tuple[float, ...]

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(g.numel() for g in self.draws[0].values()) if self.draws else 0

    def along(self, motion: Motion) -> float:
        """The largest |g·t|, relative to that of a live direction of the same size."""
        pairs = zip(self.draws, self.typical, strict=True)
        return max((relative(g, typical, motion) for g, typical in pairs), default=0.0)

    def zero_elements(self) -> Values:
        """Where every gradient is zero to rounding: True marks the element."""
        if not self.draws:
            return {}
        threshold = 1e-12 * sum(mean_size(g) for g in self.draws) / len(self.draws)
        result = {}
        for name in self.draws[0]:
            zero = self.draws[0][name].abs() <= threshold
            for g in self.draws[1:]:
                zero &= g[name].abs() <= threshold
            result[name] = zero
        return result


def gradients(graph: Graph, values: Values, draw: Draw) -> Gradients:
    """The gradient of a random functional of the outputs, for several draws of inputs; those that are finite."""
    count = sum(values[n].numel() for n in graph.parameters)
    draws = DRAWS if count < MANY else 2 if count < 4 * MANY else 1
    taken = [gradient(graph, values, draw(seed), seed) for seed in range(draws)]
    finite = [g for g in taken if all(bool(torch.isfinite(x).all()) for x in g.values())]
    return Gradients(tuple(finite), tuple(typical_size(g) for g in finite))


def gradient(graph: Graph, values: Values, inputs: Values, seed: int) -> Values:
    names = [n for n in graph.parameters if values[n].is_floating_point()]
    leaves = {n: values[n].detach().requires_grad_() for n in names}
    outputs = evaluate(graph, {**values, **leaves}, inputs)
    generator = torch.Generator().manual_seed(seed)
    total, size = torch.zeros((), dtype=torch.float64), 0.0
    for out in real_outputs(outputs):
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        total = total + (out * weights).sum()
        size = max(size, ordinary_size(out.detach()))
    none = {n: torch.zeros((), dtype=torch.float64).expand(values[n].shape) for n in names}
    if not total.requires_grad:
        return none  # no output depends on a parameter
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    grads = {n: none[n] if g is None else g.to_dense() for n, g in zip(names, gradients, strict=True)}
    return none if all(float(g.abs().max()) < ROUNDING * size for g in grads.values() if g.numel()) else grads


def ordinary_size(out: Tensor) -> float:
    """The norm of an output, without infinities and the large numbers of masks."""
    return float(torch.where(out.abs() < FILL, out, 0.0).norm())


def claim_evidence(claim: Claim, point: Point, grads: Gradients) -> float | None:
    """The largest |g·t| over random directions of the claim; None where there is no finite gradient."""
    if not grads.draws:
        return None
    generator = torch.Generator().manual_seed(11)
    directions = DIRECTIONS if grads.size < MANY else 1
    return max(grads.along(claim.direction(point, generator)) for _ in range(directions))


def relative(g: Values, typical: float, motion: Motion) -> float:
    total, size, length = 0.0, 0.0, 0.0
    for name, t in motion.items():
        length += float(t.square().sum())
        if name in g:
            product = g[name] * t
            total, size = total + float(product.sum()), size + float(product.abs().sum())
    share = abs(total) / (size + typical * length**0.5 + 1e-300)
    return share if math.isfinite(share) else math.inf  # NaN is no evidence


def typical_size(g: Values) -> float:
    """The root mean square of a whole gradient."""
    norms = [float(x.norm()) for x in g.values()]
    return math.hypot(*norms) / max(sum(x.numel() for x in g.values()), 1) ** 0.5


def mean_size(g: Values) -> float:
    """The mean of a whole gradient's absolute values."""
    return sum(float(x.abs().sum()) for x in g.values()) / max(sum(x.numel() for x in g.values()), 1)
