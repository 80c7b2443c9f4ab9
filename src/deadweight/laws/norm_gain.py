"""The gain half of DW006: every linear reader of a norm can take the gain into its own columns."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.spaces import Writers, explore, gain_site
from deadweight.laws.turn_claim import TurnClaim
from deadweight.laws.turns import turn_claim
from deadweight.proof.reading import peel, skip_shape
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import numbered

CODE, NAME = "DW006", "norm-affine"


def find(prover: Prover) -> Iterator[TurnClaim]:
    for node in prover.graph.nodes.values():
        inner, gain = peel(prover.graph, node.name, "aten.mul")
        if gain is not None and prover.graph.nodes[skip_shape(prover.graph, inner)].op.startswith("core."):
            yield from into_readers(prover, node, gain)


def into_readers(prover: Prover, node: Node, gain: str) -> Iterator[TurnClaim]:
    coordinate = numbered(node.shape[-1])
    writers = Writers()
    try:
        site = gain_site(prover.graph, gain, coordinate)
    except Blocked:
        return
    writers.add(node.name, coordinate, site)
    turned = explore(prover, writers, node.shape[-1])
    if turned.proved and len(writers.nodes) == 1 and not turned.rotations:
        claim = turn_claim(prover, CODE, NAME, site.parameter, turned)
        yield claim
