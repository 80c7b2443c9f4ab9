"""DW015 a whole Q, K or V matrix: a stream without norms may be turned by any matrix, a projection of its own included.

Choosing the turn Θ = W_Q makes that projection the identity. It takes a square, invertible projection, and a stream
whose group is all of GL(d): no norm, and the skip connections of one of the three exact cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph
from deadweight.laws.dw012_residual_basis import is_stream
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.basis import Site
from deadweight.rewrite.bases import BasisRewrite, copies_of, places_of
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.save.facts import Fact, IdentityBlocks
from deadweight.search.prover import Prover
from deadweight.search.turns import Space, spaces, turn_claim

TITLE = Title("DW015", "whole-projection")
INSTEAD = "train with the projection as the identity from the start"


def find(prover: Prover) -> Iterator[TurnClaim]:
    for space in spaces(prover):
        turned = space.turned
        whole = turned.block_sizes() == [turned.size] and not any(s.role == "gain" for s in turned.sites)
        if turned.proved and is_stream(space) and not turned.rotations and whole:
            for square in square_readers(prover, space)[:1]:
                note = "choose the turn equal to this projection: it becomes the identity, if it is invertible"
                yield turn_claim(prover, TITLE, square, turned, note=note)


def square_readers(prover: Prover, space: Space) -> list[str]:
    """The square projections that read the stream, in their order; one that writes to it as well is turned twice."""
    sites, wanted = space.turned.sites, (space.turned.size,) * 2
    writing = {s.parameter for s in sites if s.role != "in"}
    square = [s.parameter for s in sites if s.role == "in" and prover.graph.nodes[s.parameter].shape == wanted]
    return [parameter for parameter in square if parameter not in writing]


def refused(prover: Prover) -> Iterator[tuple[str, str]]:
    """The parameters of streams without a turn to spare, and why no projection that reads them can be taken out."""
    seen: set[str] = set()
    for space in spaces(prover):
        turned = space.turned
        if not is_stream(space):
            continue
        first, *others = [*square_readers(prover, space), space.writers.sites[0].parameter]
        if turned.blocked is not None:
            why = f"the stream has no other basis: {in_words(prover, turned.blocked.why)}; {INSTEAD}"
            if why not in seen:
                yield space.writers.sites[0].parameter, why
            seen.add(why)
        elif turned.rotations:
            for node in (first, *others[:-1]):
                yield node, f"a norm reads the stream, which rotations alone pass; {INSTEAD}"
        else:
            for node in others[:-1]:
                name = prover.graph.parameters[first]
                yield node, f"skips make one stream of all that it reads, and {name} takes its one turn; {INSTEAD}"


def in_words(prover: Prover, why: str) -> str:
    """The reason with the parameters' own names."""
    for node, name in prover.graph.parameters.items():
        why = why.replace(node, name)
    return why


@dataclass(frozen=True, kw_only=True)
class WholeProjection(BasisRewrite):
    """x ← Θx with Θ the projection itself, which becomes the identity."""

    claim: TurnClaim

    def heads(self) -> list[list[int]]:
        site = self.reader()
        return [sorted(set(site.coordinate.tolist()) - {0})]

    def with_tighter_limits(self) -> Iterator[Rewrite]:
        yield from ()  # the whole matrix or none of it

    @property
    def makes_identity(self) -> bool:
        return True

    def reader(self) -> Site:
        return next(s for s in self.sites if s.parameter == self.claim.node)  # it does not write the stream

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        site = self.reader()
        theta = tensors[self.target].movedim(site.axis, 1).clone()
        condition = float(torch.linalg.cond(theta))
        if not condition < self.growth:
            raise NotDone(f"the projection has condition number {condition:.0f}; it would cost precision")
        if any(s.gain is not None for s in self.sites):
            raise NotDone("a factor per channel stands on the stream")
        (stream,) = self.heads()
        inverse_theta = torch.linalg.inv(theta).T
        actions = []
        for s in self.sites:
            matrix = theta if s.role == "out" else inverse_theta
            actions.append((s, [(places_of(s, stream, copy), matrix) for copy in copies_of(s, stream)]))
        self.turn(tensors, actions)
        size = len(stream)
        tensors[self.target] = torch.eye(size, dtype=torch.float64)
        every = tuple(range(size))
        return [IdentityBlocks(self.target, 1 - site.axis, (every,), every, whole=True)]


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, TurnClaim)
    return WholeProjection(graph=graph, claim=claim)


LAW = Law(
    title=TITLE,
    fix="build the model without this projection",
    searches=(Search(220, find),),
    rewriting=Rewriting(
        order=100,
        make=make_rewrite,
        slim_only="in the stock layout the identity would still be stored",
        all_blocks=True,
    ),
    refusals=refused,
)
