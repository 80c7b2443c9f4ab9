"""DW012 residual basis: the whole stream may be turned, by rotations where norms read it, by anything where none do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deadweight.claims.claim import Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.laws.law import Kept, Law, Search
from deadweight.search.prover import Prover
from deadweight.search.turns import Space, dimension, spaces, turn_claim
from deadweight.search.unseen_directions import find_unseen_turns

TITLE = Title("DW012", "residual-basis")


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
            yield turn_claim(prover, TITLE, space.writers.sites[0].parameter, space.turned)


def is_stream(space: Space) -> bool:
    """Several parameters write to it, or a norm reads it."""
    return len(space.writing) > 1 or space.turned.rotations


LAW = Law(
    title=TITLE,
    fix="nothing in code: rotate outliers away before quantising",
    searches=(Search(210, find), Search(212, partial(find_unseen_turns, law=TITLE))),
    rewriting=Kept("turning the whole stream saves no whole row or column; it changes every matrix for nothing"),
)
