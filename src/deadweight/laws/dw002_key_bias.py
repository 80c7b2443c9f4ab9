"""DW002 key bias: softmax over the keys cancels what every key adds alike."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Node, is_vector
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.operation_groups import SOFTMAXES
from deadweight.proof.shift import Outcome
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.prover import Prover
from deadweight.search.shifts import each_element, ended_at, passed

TITLE = Title("DW002", "key-bias")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_vector(node):
            yield from each_element(prover, TITLE, node, is_key_bias)


def is_key_bias(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The shift met the queries in a product and died in the softmax behind it."""
    met_queries = passed(outcome, "aten.matmul")
    return not outcome.absorbed and met_queries and bool(SOFTMAXES & ended_at(outcome))


LAW = Law(
    title=TITLE,
    fix="build the key projection with bias=False; if fused, keep only the query bias",
    searches=(Search(20, find),),
    rewriting=Rewriting(order=40, make=rewrite_shift),
    avoidable=True,
)
