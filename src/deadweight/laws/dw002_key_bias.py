"""DW002 key bias: softmax over the keys cancels what every key adds alike."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import each_element, ended_at, is_vector, passed
from deadweight.proof.opsets import SOFTMAXES
from deadweight.proof.shift import Outcome

CODE, NAME = "DW002", "key-bias"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_vector(node):
            yield from each_element(prover, CODE, NAME, node, is_key_bias)


def is_key_bias(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The shift met the queries in a product and died in the softmax behind it."""
    met_queries = passed(outcome, "aten.matmul")
    return not outcome.absorbed and met_queries and bool(SOFTMAXES & ended_at(outcome))
