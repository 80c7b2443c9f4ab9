"""DW004 for weights that are standardised themselves: the mean of every row that a norm centres is dead."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.laws.normalised_weight import candidates, changed_before_use
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import CENTRES, ended_at, is_vector, make_claim

CODE, NAME = "DW004", "bias-before-statistics"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in changed_before_use(prover):
        taken = any(claim.node == node.name for claim in prover.claims)
        for parts in () if taken or is_vector(node) else candidates(node):
            outcome = prover.attempt(node.name, parts)
            if outcome.proved and ended_at(outcome) & {*CENTRES, "aten.sub"}:
                yield make_claim(prover, CODE, NAME, node, parts, outcome)
                break
