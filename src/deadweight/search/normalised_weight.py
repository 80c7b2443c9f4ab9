"""DW014 for parameters that are normalised themselves: weight norm, spectral norm, standardised weights.

W/‖W‖ stays the same when W is scaled: the length of every row that is divided by its norm, or of the whole matrix that
is divided by its largest singular value, is redundant. Exact where the norm has no ε.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.node import Node
from deadweight.proof.scale import Scaled, ScaleWalk
from deadweight.proof.steps import Step
from deadweight.search.prover import Prover


@dataclass(frozen=True, kw_only=True)
class LengthClaim(Claim):
    """Every part of one parameter may be multiplied by a positive number of its own; `parts` numbers them from 1."""

    parts: Tensor

    def motions(self, point: Point) -> Iterator[Motion]:
        for rates in torch.eye(self.dof, dtype=torch.float64):
            yield self.scaled(point, rates)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.scaled(point, normal(generator, self.dof))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        factors = torch.rand(self.dof, generator=generator, dtype=torch.float64) + 0.5
        return {self.node: point.values[self.node] * factors[self.parts - 1]}

    def scaled(self, point: Point, rates: Tensor) -> Motion:
        return {self.node: point.values[self.node] * rates[self.parts - 1]}


def find_lengths(prover: Prover, law: Title) -> Iterator[LengthClaim]:
    for node in changed_before_use(prover):
        yield from lengths(prover, law, node)


def changed_before_use(prover: Prover) -> Iterator[Node]:
    """Parameters of which something is computed before they meet the model's input."""
    for node in prover.parameters():
        if not any(prover.graph.depends[reader.name][1] for reader in prover.graph.users[node.name]):
            yield node


def lengths(prover: Prover, law: Title, node: Node) -> Iterator[LengthClaim]:
    """One scale for each index of an axis, or one for all."""
    for parts in candidates(node):
        scaled = ScaleWalk(prover.graph, node.name, parts).run()
        if scaled.proved:
            yield length_claim(law, node, parts, scaled)
            return


def candidates(node: Node) -> Iterator[Tensor]:
    for axis, size in enumerate(node.shape):
        if size > 1:
            numbers = torch.arange(1, size + 1).reshape([-1 if a == axis else 1 for a in range(len(node.shape))])
            yield numbers.expand(node.shape)
    yield torch.ones(node.shape, dtype=torch.int64)


def length_claim(law: Title, node: Node, parts: Tensor, scaled: Scaled) -> LengthClaim:
    exact = "the length of a weight that is divided by its own norm"
    return LengthClaim(
        law=law,
        node=node.name,
        dof=int(parts.max()),
        verdict="gauge",
        tier="epsilon" if scaled.epsilon else "real",
        steps=(Step(node.name, node.op, "the parameter is scaled here", "scaled", True), *scaled.steps),
        note=f"the norm's ε of {scaled.epsilon:g} is taken for 0" if scaled.epsilon else exact,
        epsilon=scaled.epsilon,
        parts=parts,
    )
