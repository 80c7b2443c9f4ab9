"""DW017 two biases at one place: of parameters added to the same sum with the same broadcast only the sum counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.laws.dw004_bias_before_statistics import TITLE as BEFORE_STATISTICS
from deadweight.laws.dw005_mean_before_layernorm import TITLE as MEAN_BEFORE_LAYERNORM
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.shift import Outcome
from deadweight.rewrite.rewrite import NotDone, Rewrite
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.prover import Prover
from deadweight.search.repeated_columns import find_repeated_columns
from deadweight.search.same_value import find_same_values
from deadweight.search.shifts import (
    added_once,
    all_claimed,
    claimed,
    common,
    each_element,
    ended_at,
    norm_behind,
    passed,
    vector_claim,
)

TITLE = Title("DW017", "biases-at-one-place")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        table = any(r.op == "aten.embedding" for r in prover.graph.users[node.name])
        if is_vector(node) and not table and not all_claimed(prover, node):
            of_norm = norm_behind(prover.graph, added_once(prover.graph, node)) is not None
            if not of_norm:
                yield from whole(prover, node) or each_element(prover, TITLE, node, meets_another, "biases")
            if not prover.has(MEAN_BEFORE_LAYERNORM, node.name) and not prover.has(TITLE, node.name):
                yield from common(prover, TITLE, node, mean_meets_another, "biases")


def whole(prover: Prover, node: Node) -> list[ShiftClaim]:
    """The whole vector, where it meets another before it falls into parts: all gates of a recurrent cell."""
    groups = torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)
    if len(prover.parts(node)) < 2 or claimed(prover, node, groups):
        return []
    outcome = prover.walk(node.name, groups, "biases")
    taken = outcome.proved and meets_another(prover, node, outcome)
    return [vector_claim(prover, TITLE, node, groups, outcome)] if taken else []


def mean_meets_another(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The part that LayerNorm ignores, on a stream that is also read without one: only the sum of the means counts."""
    return bool(outcome.absorbed) and "core.layer" in ended_at(outcome)


def meets_another(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return (
        bool(outcome.absorbed) and not passed(outcome, "aten.matmul") and not prover.has(BEFORE_STATISTICS, node.name)
    )


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    if isinstance(claim, ShiftClaim):
        return rewrite_shift(graph, claim)
    raise NotDone("two weights, columns or factors of one value: both stay in the model's code")


LAW = Law(
    title=TITLE,
    fix="keep one of the two biases: build the other layer with bias=False",
    searches=(
        Search(90, find),
        Search(95, partial(find_same_values, law=TITLE)),
        Search(270, partial(find_repeated_columns, law=TITLE)),
    ),
    rewriting=Rewriting(order=80, make=make_rewrite),
    avoidable=True,
)
