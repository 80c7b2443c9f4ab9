"""DW010 value-output basis: values and what reads the heads may be turned together, head by head."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.laws.prover import Prover
from deadweight.laws.turn_claim import TurnClaim
from deadweight.laws.turns import spaces, turn_claim

CODE, NAME = "DW010", "value-output-basis"


def find(prover: Prover) -> Iterator[TurnClaim]:
    for space in spaces(prover):
        alone = len(space.writing) == 1 and not space.of_experts and not space.turned.powers
        if space.turned.proved and alone and space.passed("aten.matmul"):
            yield turn_claim(prover, CODE, NAME, space.writers.sites[0].parameter, space.turned)
