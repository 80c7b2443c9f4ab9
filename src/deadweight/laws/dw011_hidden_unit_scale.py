"""DW011 hidden-unit scale: a ReLU unit, or the linear branch of a gated one, can trade scale with what reads it.

A squared ReLU trades s for 1/s²: every positively homogeneous unit has its power.

A factor per channel right behind a linear map (LayerScale) is such a reader, and folds into the map's rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.laws.prover import Prover
from deadweight.laws.scale_claim import ScaleClaim, scale_claims
from deadweight.laws.turn_claim import TurnClaim
from deadweight.laws.turns import spaces, turn_claim
from deadweight.proof.opsets import POSITIVELY_HOMOGENEOUS

CODE, NAME = "DW011", "hidden-unit-scale"


def find(prover: Prover) -> Iterator[TurnClaim | ScaleClaim]:
    for space in spaces(prover):
        units = space.passed(*POSITIVELY_HOMOGENEOUS) or space.turned.powers
        alone = (units or len(space.writing) == 1) and not space.passed("aten.matmul")
        between = units or space.passed("aten.mul", "aten.div")
        if space.turned.proved and alone and between and max(space.turned.block_sizes()) == 1:
            yield turn_claim(prover, CODE, NAME, space.writers.sites[0].parameter, space.turned)
    yield from scale_claims(prover.graph, CODE, NAME, statistics=False)
