"""DW018 softmax elsewhere: routers, relative-position tables and pooling scores, along the axis of their softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.canonical import PROBABILITIES
from deadweight.graph.node import Node, is_vector
from deadweight.laws.dw002_key_bias import TITLE as KEY_BIAS
from deadweight.laws.law import Kept, Law, Search
from deadweight.proof.operation_groups import SOFTMAXES
from deadweight.proof.shift import Outcome
from deadweight.search.prover import Prover
from deadweight.search.shifts import common, each_element, ended_at, make_claim, passed

TITLE = Title("DW018", "softmax-elsewhere")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if prover.has(KEY_BIAS, node.name) or not prover.graph.users[node.name]:
            continue
        if is_vector(node):
            single = list(each_element(prover, TITLE, node, dies_in_softmax))
            yield from single or common(prover, TITLE, node, dies_in_softmax)
        else:
            yield from common(prover, TITLE, node, dies_in_softmax)
            yield from columns(prover, node)


def columns(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """All rows of a table alike: a relative-position bias, one number per head."""
    if (
        len(node.shape) < 2
        or prover.surely_alive(node.name)
        or not any(r.op in ("aten.embedding", "aten.index") for r in prover.graph.users[node.name])
    ):
        return
    groups = torch.arange(1, node.shape[-1] + 1).expand(node.shape)
    outcome = prover.attempt(node.name, groups)
    if outcome.proved and dies_in_softmax(prover, node, outcome):
        yield make_claim(prover, TITLE, node, groups, outcome)


def dies_in_softmax(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """It dies in a softmax without having met queries first."""
    attention = passed(outcome, "aten.matmul") and is_vector(node)
    if PROBABILITIES in {s.node for s in outcome.steps}:
        return False  # the reader of the output, not a softmax of the model
    return not outcome.absorbed and bool(SOFTMAXES & ended_at(outcome)) and not attention


LAW = Law(
    title=TITLE,
    fix="build the scores without a bias; leave routers and tables as they are",
    searches=(Search(30, find),),
    rewriting=Kept("an average over experts, heads or buckets: no whole row or column goes"),
)
