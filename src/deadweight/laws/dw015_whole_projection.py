"""DW015 a whole Q, K or V matrix: a stream without norms may be turned by any matrix, a projection of its own included.

Choosing the turn Θ = W_Q makes that projection the identity. It takes a square, invertible projection, and a stream
whose group is all of GL(d): no norm, and the skip connections of one of the three exact cases.
"""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.laws.dw012_residual_basis import is_stream
from deadweight.laws.prover import Prover
from deadweight.laws.turn_claim import TurnClaim
from deadweight.laws.turns import Space, spaces, turn_claim

CODE, NAME = "DW015", "whole-projection"
INSTEAD = "train with the projection as the identity from the start"


def find(prover: Prover) -> Iterator[TurnClaim]:
    for space in spaces(prover):
        turned = space.turned
        if turned.proved and is_stream(space) and not turned.rotations and turned.block_sizes() == [turned.size]:
            for square in square_readers(prover, space)[:1]:
                note = "choose the turn equal to this projection: it becomes the identity, if it is invertible"
                yield turn_claim(prover, CODE, NAME, square, turned, note=note)


def square_readers(prover: Prover, space: Space) -> list[str]:
    """The square projections that read the stream, in their order."""
    wanted = (space.turned.size,) * 2
    return [
        s.parameter for s in space.turned.sites if s.role == "in" and prover.graph.nodes[s.parameter].shape == wanted
    ]


def refused(prover: Prover) -> Iterator[tuple[str, str]]:
    """The parameters of streams without a turn to spare, and why no projection that reads them can be taken out."""
    seen: set[str] = set()
    for space in spaces(prover):
        turned = space.turned
        if not is_stream(space):
            continue
        first, *others = [*square_readers(prover, space), space.writers.sites[0].parameter]
        if turned.blocked is not None:
            why = f"the stream has no other basis: {in_words(prover, turned.blocked.why)}; {INSTEAD}"
            if why not in seen:
                yield space.writers.sites[0].parameter, why
            seen.add(why)
        elif turned.rotations:
            for node in (first, *others[:-1]):
                yield node, f"a norm reads the stream, which rotations alone pass; {INSTEAD}"
        else:
            for node in others[:-1]:
                name = prover.graph.parameters[first]
                yield node, f"skips make one stream of all that it reads, and {name} takes its one turn; {INSTEAD}"


def in_words(prover: Prover, why: str) -> str:
    """The reason with the parameters' own names."""
    for node, name in prover.graph.parameters.items():
        why = why.replace(node, name)
    return why
