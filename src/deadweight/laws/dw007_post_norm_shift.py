"""DW007 post-norm shift: a norm that feeds readers and the residual alike can lose its shift to the biases behind."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.graph.node import Node
from deadweight.laws.dw006_norm_affine import on_residual_path
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import each_norm_shift
from deadweight.proof.shift import Outcome

CODE, NAME = "DW007", "post-norm-shift"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    return each_norm_shift(prover, CODE, NAME, residual_takes_it)


def residual_takes_it(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return bool(outcome.absorbed) and on_residual_path(prover, outcome)
