"""DW012 residual basis: the whole stream may be turned, by rotations where norms read it, by anything where none do."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.laws.prover import Prover
from deadweight.laws.turn_claim import TurnClaim
from deadweight.laws.turns import Space, dimension, spaces, turn_claim

CODE, NAME = "DW012", "residual-basis"


def find(prover: Prover) -> Iterator[TurnClaim]:
    named = [c.sites[0] for c in prover.claims if isinstance(c, TurnClaim)]
    for space in spaces(prover):
        fresh = (
            space.turned.proved and not space.of_experts and not any(site is space.turned.sites[0] for site in named)
        )
        if (
            fresh
            and not space.turned.powers
            and is_stream(space)
            and space.turned.rotations
            and dimension(space.turned)
        ):
            yield turn_claim(prover, CODE, NAME, space.writers.sites[0].parameter, space.turned)


def is_stream(space: Space) -> bool:
    """Several parameters write to it, or a norm reads it."""
    return len(space.writing) > 1 or space.turned.rotations
