"""Evidence: gradients in float64, with random parameters and random inputs. It shares no code with the proofs.

One backward pass of a random functional of the output gives every parameter's gradient g. A motion t that changes
nothing has g·t = 0 to rounding; and a finite step along a dead direction leaves the output where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from deadweight.graph.evaluate import FILL, evaluate, largest_difference, real_outputs
from deadweight.graph.node import Graph
from deadweight.laws.claim import Claim, Motion
from deadweight.laws.dw009_query_key_basis import ContractionClaim

Values = dict[str, Tensor]
Draw = Callable[[int], Values]
DRAWS = 4
MOTIONS = 3  # per claim
ROUNDING = 1e-13  # of the outputs' size: a whole gradient below that is what rounding leaves of none
STEP = 3.0  # "by a lot": parameters are of order one


def gradients(graph: Graph, values: Values, draw: Draw) -> list[Values]:
    """The gradient of a random functional of the outputs, for several draws of inputs; those that are finite."""
    found = [gradient(graph, values, draw(seed), seed) for seed in range(DRAWS)]
    return [g for g in found if all(bool(torch.isfinite(x).all()) for x in g.values())]


def gradient(graph: Graph, values: Values, inputs: Values, seed: int) -> Values:
    names = [n for n in graph.parameters if values[n].is_floating_point()]
    leaves = {n: values[n].detach().clone().requires_grad_() for n in names}
    outputs = evaluate(graph, {**values, **leaves}, inputs)
    generator = torch.Generator().manual_seed(seed)
    total, size = torch.zeros((), dtype=torch.float64), 0.0
    for out in real_outputs(outputs):
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        total = total + (out * weights).sum()
        size = max(size, ordinary_size(out.detach()))
    none = {n: torch.zeros_like(values[n]) for n in names}
    if not total.requires_grad:
        return none  # nothing that is returned depends on a parameter
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    grads = {n: none[n] if g is None else g.to_dense() for n, g in zip(names, found, strict=True)}
    return none if all(float(g.abs().max()) < ROUNDING * size for g in grads.values() if g.numel()) else grads


def ordinary_size(out: Tensor) -> float:
    """The length of an output, leaving out what is infinite or a mask's fill."""
    return float(torch.where(out.abs() < FILL, out, 0.0).norm())


def claim_evidence(graph: Graph, claim: Claim, values: Values, draw: Draw, grads: list[Values]) -> float | None:
    """The largest |g·t| over sampled motions, relative to what a live direction of that size would give."""
    if isinstance(claim, ContractionClaim) and not claim.diagonal and len(claim.products[0].left) > 16:
        return None  # solving for its motions takes too long at this width; a narrow clone shows them
    motions = list(islice(claim.motions(graph, values, draw(0)), MOTIONS))
    worst = max((relative(g, motion) for motion in motions for g in grads), default=None)
    if motions and claim.verdict == "dead":
        worst = max(worst or 0.0, finite_step(graph, claim, values, draw(1)))
    return worst


def relative(g: Values, motion: Motion) -> float:
    total = sum(float((g[n] * t).sum()) for n, t in motion.items() if n in g)
    size = sum(float((g[n] * t).abs().sum()) for n, t in motion.items() if n in g)
    length = sum(float(t.square().sum()) for t in motion.values()) ** 0.5
    share = abs(total) / (size + typical_size(g) * length + 1e-300)
    return share if math.isfinite(share) else math.inf  # a motion that is no number is no evidence


def typical_size(g: Values) -> float:
    """The root mean square of a whole gradient."""
    norms = torch._foreach_norm(list(g.values()))
    return float(torch.stack(norms).norm()) / max(sum(x.numel() for x in g.values()), 1) ** 0.5


def finite_step(graph: Graph, claim: Claim, values: Values, inputs: Values) -> float:
    """How much the outputs change when what is called dead moves by a lot."""
    generator = torch.Generator().manual_seed(7)
    moved = dict(values)
    for motion in islice(claim.motions(graph, values, inputs), 64):
        step = STEP * float(torch.randn((), generator=generator))
        for name, t in motion.items():
            moved[name] = moved[name] + step * t
    return largest_difference(evaluate(graph, values, inputs), evaluate(graph, moved, inputs))


def zero_elements(graph: Graph, grads: list[Values]) -> Values:
    """Where every gradient is zero to rounding: True marks the element."""
    found = {}
    for name in grads[0] if grads else ():
        total = torch.stack([g[name].abs() for g in grads]).amax(0)
        typical = torch.stack([torch.cat([x.reshape(-1) for x in g.values()]).abs().mean() for g in grads]).mean()
        found[name] = total <= 1e-12 * typical
    return found
