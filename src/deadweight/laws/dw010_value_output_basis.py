"""DW010 value-output basis: values and what reads the heads may be turned together, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.rewrite.bases import BasisRewrite, copies_of, places_of, worthwhile
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.save.facts import Fact
from deadweight.search.prover import Prover
from deadweight.search.turns import spaces, turn_claim

TITLE = Title("DW010", "value-output-basis")


def find(prover: Prover) -> Iterator[TurnClaim]:
    for space in spaces(prover):
        alone = len(space.writing) == 1 and not space.of_experts and not space.turned.powers
        if space.turned.proved and alone and space.passed("aten.matmul"):
            yield turn_claim(prover, TITLE, space.writers.sites[0].parameter, space.turned)


@dataclass(frozen=True, kw_only=True)
class ValueBasis(BasisRewrite):
    """W_V ← B⁻¹W_V, W_O ← W_O·B, where B is a block of W_V."""

    claim: TurnClaim

    def heads(self) -> list[list[int]]:
        present = sorted(set(self.sites[0].coordinate.tolist()) - {0})
        blocks: dict[int, list[int]] = {}
        for c in present:
            blocks.setdefault(int(self.claim.blocks[c]), []).append(c)
        return list(blocks.values())

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        own, heads = self.own_site(), self.heads()
        self.leave_identities(known)
        if any(s.gain is not None for s in self.sites):
            raise NotDone("a factor per channel stands inside the head")
        if len({len(h) for h in heads}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, h) for h in heads]
        columns = self.columns(weight, rows, known.lost_columns(self.target))
        blocks = [weight[r][:, columns].clone() for r in rows]
        inverses = [torch.linalg.inv(block) for block in blocks]
        actions = []
        for site in self.sites:
            matrices = inverses if site.role == "out" else [block.T for block in blocks]
            mine = [
                (places_of(site, head, copy), matrix)
                for head, matrix in zip(heads, matrices, strict=True)
                for copy in copies_of(site, head)
            ]
            actions.append((site, mine))
        self.turn(tensors, actions)
        return self.finish(tensors, rows, columns)


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, TurnClaim)
    if claim.rotations:
        raise NotDone("behind a norm only rotations are free: nothing is stored less")
    return worthwhile(ValueBasis(graph=graph, claim=claim))


LAW = Law(
    title=TITLE,
    fix="nothing in code: `deadweight reduce` stores an identity block per head",
    searches=(Search(190, find),),
    rewriting=Rewriting(
        order=110, make=make_rewrite, slim_only="in the stock layout the identity block would still be stored"
    ),
)
