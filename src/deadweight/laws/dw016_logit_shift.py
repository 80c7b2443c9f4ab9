"""DW016 shift of all logits: probabilities ignore what every logit gains alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deadweight.claims.claim import Title, noted
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.canonical import PROBABILITIES
from deadweight.graph.node import Node
from deadweight.laws.law import Kept, Law, Search
from deadweight.proof.shift import Outcome
from deadweight.search.prover import Prover
from deadweight.search.shifts import common

TITLE = Title("DW016", "logit-shift")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    if PROBABILITIES not in prover.graph.nodes:
        return
    for node in prover.parameters():
        for claim in common(prover, TITLE, node, dies_in_the_reader):
            yield replace(claim, note=noted(claim, "keeps probabilities, not logits"))


def dies_in_the_reader(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return not outcome.absorbed and PROBABILITIES in {s.node for s in outcome.steps if s.value is None}


LAW = Law(
    title=TITLE,
    fix="nothing in code: centre the unembedding before comparing checkpoints",
    searches=(Search(40, find),),
    rewriting=Kept("keeps probabilities, not logits"),
)
