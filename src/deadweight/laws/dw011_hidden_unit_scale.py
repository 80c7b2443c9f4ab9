"""DW011 hidden-unit scale: a ReLU unit, or the linear branch of a gated one, can trade scale with what reads it.

A squared ReLU trades s for 1/s²: every positively homogeneous unit has its power.

A learned factor of what parameters write linearly (a scale of each attention head) folds into these.

A factor per channel right behind a linear map (LayerScale) is such a reader, and folds into the map's rows; one before
linear maps, whatever it multiplies, trades scale with their columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deadweight.claims.claim import Claim, Title
from deadweight.claims.scale_claim import ScaleClaim
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.operation_groups import HOMOGENEOUS_OVER_PLACES, POSITIVELY_HOMOGENEOUS
from deadweight.rewrite.rewrite import NotDone, Rewrite
from deadweight.rewrite.scales import FoldScale
from deadweight.search.channel_scales import find_channel_scales
from deadweight.search.learned_factor import find_learned_factors
from deadweight.search.prover import Prover
from deadweight.search.read_gains import find_read_gains
from deadweight.search.turns import spaces, turn_claim

TITLE = Title("DW011", "hidden-unit-scale")


def find(prover: Prover) -> Iterator[TurnClaim | ScaleClaim]:
    for space in spaces(prover):
        units = space.passed(*POSITIVELY_HOMOGENEOUS, *HOMOGENEOUS_OVER_PLACES) or space.turned.powers
        alone = (units or len(space.writing) == 1) and not space.passed("aten.matmul")
        between = units or space.passed("aten.mul", "aten.div")
        if space.turned.proved and alone and between and max(space.turned.block_sizes()) == 1:
            yield turn_claim(prover, TITLE, space.writers.sites[0].parameter, space.turned)
    yield from find_channel_scales(prover.graph, TITLE, statistics=False)


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    if isinstance(claim, ScaleClaim):
        return FoldScale(graph=graph, claim=claim)
    raise NotDone("a choice of scale for each hidden unit: nothing is stored less")


LAW = Law(
    title=TITLE,
    fix="nothing in code: balance the units before quantising",
    searches=(
        Search(200, find),
        Search(205, partial(find_learned_factors, law=TITLE)),
        Search(245, partial(find_read_gains, law=TITLE, of_norms=False)),
    ),
    rewriting=Rewriting(order=70, make=make_rewrite),
)
