"""DW019 linear chain: two linear maps with nothing non-linear between them; any basis may be chosen in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deadweight.claims.claim import Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.laws.law import Kept, Law, Search
from deadweight.search.projected_state import find_projected_states
from deadweight.search.prover import Prover
from deadweight.search.turns import dimension, spaces, turn_claim

TITLE = Title("DW019", "linear-chain")


def find(prover: Prover) -> Iterator[TurnClaim]:
    """Spaces that are read by linear maps alone and that no other law has named."""
    named = [c.sites for c in prover.claims if isinstance(c, TurnClaim)]
    for space in spaces(prover):
        turned = space.turned
        if (
            turned.proved
            and not space.of_experts
            and not turned.rotations
            and not turned.powers
            and dimension(turned)
            and not any(sites[0] is turned.sites[0] for sites in named)
        ) and any(s.role == "in" for s in turned.sites):
            yield turn_claim(prover, TITLE, space.writers.sites[0].parameter, turned)


LAW = Law(
    title=TITLE,
    fix="multiply the two maps into one layer, unless a bottleneck lies between them",
    searches=(Search(230, find), Search(240, partial(find_projected_states, law=TITLE))),
    rewriting=Kept("a product of two matrices; multiplying them out is a change of architecture"),
)
