"""DW007 post-norm shift: a norm that feeds readers and the residual alike can lose its shift to the biases behind."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.graph.node import Node
from deadweight.laws.dw006_norm_affine import on_residual_path
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import added_once, each_element, is_vector, norm_behind
from deadweight.proof.shift import Outcome

CODE, NAME = "DW007", "post-norm-shift"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_vector(node) and norm_behind(prover.graph, added_once(prover.graph, node)) is not None:
            yield from each_element(prover, CODE, NAME, node, residual_takes_it, "weights")


def residual_takes_it(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return bool(outcome.absorbed) and on_residual_path(prover, outcome)
