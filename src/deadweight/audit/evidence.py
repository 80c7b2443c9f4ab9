"""Evidence: gradients in float64, with random parameters and random inputs. It shares no code with the proofs.

One backward pass of a random functional of the output gives the gradient g of every parameter. A motion t that changes
nothing has g·t = 0 up to rounding. A claim is tested along random directions of its whole redundant space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
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
PIECE = 1 << 20  # elements of a gradient that are multiplied at a time
ROUNDING = 1e-13  # relative to the outputs: a gradient that is smaller everywhere is zero up to rounding


@dataclass(frozen=True)
class Gradients:
    """Gradients for several draws of inputs, and the root mean square of each whole gradient."""

    draws: tuple[Values, ...]
    typical: tuple[float, ...]
    size: int  # how many parameters there are

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
            result[name] = torch.ones(self.draws[0][name].shape, dtype=torch.bool)
            for g in self.draws:
                result[name] &= (g[name] <= threshold) & (g[name] >= -threshold)
        return result


def gradients(graph: Graph, values: Values, draw: Draw, keep: Set[str] | None = None) -> Gradients:
    """The gradient of a random functional of the outputs, for several draws of inputs; those that are finite.

    With `keep`, only the gradients of these parameters are kept: of a large model each is as large as its parameters.
    """
    count = sum(values[n].numel() for n in graph.parameters)
    taken, typical = list[Values](), list[float]()
    for seed in range(DRAWS if count < MANY else 2 if count < 4 * MANY else 1):
        g = gradient(graph, values, draw(seed), seed)
        size = typical_size(g)
        if math.isfinite(size):
            taken.append(g if keep is None else {n: t for n, t in g.items() if n in keep})
            typical.append(size)
    return Gradients(tuple(taken), tuple(typical), count)


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
    return none if all(largest(g) < ROUNDING * size for g in grads.values() if g.numel()) else grads


def largest(g: Tensor) -> float:
    """The largest absolute value, without a copy of the tensor."""
    return float(torch.linalg.vector_norm(g, math.inf))


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
        length += float(t.norm()) ** 2
        for one, other in rows_of(g[name], t) if name in g else ():
            product = one * other
            total, size = total + float(product.sum()), size + float(product.norm(1))
    share = abs(total) / (size + typical * length**0.5 + 1e-300)
    return share if math.isfinite(share) else math.inf  # NaN is no evidence


def rows_of(g: Tensor, t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, a few rows at a time: their product is then never stored as a whole."""
    if g.numel() <= PIECE:
        yield g, t
        return
    rows = max(1, PIECE // g[0].numel())
    yield from zip(g.split(rows), t.split(rows), strict=True)


def typical_size(g: Values) -> float:
    """The root mean square of a whole gradient."""
    norms = [float(x.norm()) for x in g.values()]
    return math.hypot(*norms) / max(sum(x.numel() for x in g.values()), 1) ** 0.5


def mean_size(g: Values) -> float:
    """The mean of a whole gradient's absolute values."""
    return sum(float(x.norm(1)) for x in g.values()) / max(sum(x.numel() for x in g.values()), 1)
