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


def find(prover: Prover) -> Iterator[TurnClaim]:
    for space in spaces(prover):
        turned = space.turned
        if turned.proved and is_stream(space) and not turned.rotations and turned.block_sizes() == [turned.size]:
            square = square_reader(prover, space)
            if square is not None:
                note = "choose the turn equal to this projection: it becomes the identity, if it is invertible"
                yield turn_claim(prover, CODE, NAME, square, turned, note=note)


def square_reader(prover: Prover, space: Space) -> str | None:
    """The first square projection that reads the stream."""
    for site in space.turned.sites:
        if site.role == "in" and prover.graph.nodes[site.parameter].shape == (space.turned.size,) * 2:
            return site.parameter
    return None
