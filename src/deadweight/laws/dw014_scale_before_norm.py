"""DW014 scale before a norm: everything that feeds a norm may be scaled together; exact if the norm's ε were 0."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Node
from deadweight.laws.law import Kept, Law, Search
from deadweight.proof.steps import Blocked
from deadweight.search.line_scales import find_line_scales
from deadweight.search.normalised_weight import find_lengths
from deadweight.search.prover import Prover
from deadweight.search.spaces import Writers, bring_in, explore

TITLE = Title("DW014", "scale-before-norm")


def find(prover: Prover) -> Iterator[Claim]:
    covered: set[str] = set()
    for claim, nodes in find_line_scales(prover, TITLE):
        covered.update(nodes)
        yield claim
    for node in prover.graph.nodes.values():
        of_data = prover.graph.depends[node.name][1]  # a normalised weight is another finder's
        if node.op in ("core.layer", "core.rms", "core.unit") and of_data and node.inputs[0] not in covered:
            yield from scale(prover, node, covered)


def scale(prover: Prover, node: Node, covered: set[str]) -> Iterator[TurnClaim]:
    writers = Writers()
    try:
        bring_in(prover.graph, writers, node.inputs[0], 1, scalar=True)
    except Blocked:
        return
    if set(writers.nodes) & covered:
        return
    turned = explore(prover, writers, 1, scalar=True)
    covered.update(writers.nodes)
    if turned.proved and turned.epsilon is not None:
        first = turned.sites[0].parameter
        yield TurnClaim(
            law=TITLE,
            node=first,
            dof=1,
            verdict="gauge",
            tier="epsilon",
            into=tuple(dict.fromkeys(s.parameter for s in turned.sites[1:])),
            steps=tuple(turned.steps),
            note=f"the norm's ε of {turned.epsilon:g} is taken for 0",
            epsilon=turned.epsilon,
            sites=tuple(turned.sites),
            blocks=torch.zeros(2, dtype=torch.int64),
            scalar=True,
        )


LAW = Law(
    title=TITLE,
    fix="nothing in code: weight decay on it does not regularise",
    searches=(Search(250, partial(find_lengths, law=TITLE)), Search(260, find)),
    rewriting=Kept("one number; and it holds only if the norm's ε were 0"),
    tiers=("epsilon", "real"),
)
