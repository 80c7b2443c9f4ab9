"""DW003 value bias: attention weights sum to one, so a value bias passes through and folds into the output bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deadweight.claims.claim import Title, noted
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Node, is_vector
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.shift import Outcome
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.prover import Prover
from deadweight.search.shifts import added_once, each_element, norm_behind, passed

TITLE = Title("DW003", "value-bias")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_vector(node) and norm_behind(prover.graph, added_once(prover.graph, node)) is None:
            for claim in each_element(prover, TITLE, node, is_value_bias, "biases"):
                yield replace(claim, note=noted(claim, "eval: attention dropout, if any, is off"))


def is_value_bias(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The shift passed a product with weights that sum to one, and something behind it took it over."""
    return bool(outcome.absorbed) and passed(outcome, "aten.matmul")


LAW = Law(
    title=TITLE,
    fix="build the value projection with bias=False; the output bias does its work",
    searches=(Search(80, find),),
    rewriting=Rewriting(order=50, make=rewrite_shift),
    avoidable=True,
)
