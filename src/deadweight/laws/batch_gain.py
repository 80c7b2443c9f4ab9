"""The gain half of DW004: in eval a BatchNorm's gain, and with it the whole norm, folds into the layer before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deadweight.laws.prover import Prover
from deadweight.laws.scale_claim import ScaleClaim, scale_claims

CODE, NAME = "DW004", "bias-before-statistics"


def find(prover: Prover) -> Iterator[ScaleClaim]:
    for claim in scale_claims(prover.graph, CODE, NAME, statistics=True):
        yield replace(claim, tier="mode", note="eval: running statistics")
