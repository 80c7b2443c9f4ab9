"""DW017 two biases at one place: of parameters added to the same sum with the same broadcast only the sum counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import (
    added_once,
    all_claimed,
    claimed,
    common,
    each_element,
    ended_at,
    is_vector,
    make_claim,
    mean_claimed,
    norm_behind,
    passed,
)
from deadweight.proof.shift import Outcome

LAW = CODE, NAME = "DW017", "biases-at-one-place"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        table = any(r.op == "aten.embedding" for r in prover.graph.users[node.name])
        if is_vector(node) and not table and not all_claimed(prover, node):
            of_norm = norm_behind(prover.graph, added_once(prover.graph, node)) is not None
            single = () if of_norm else whole(prover, node) or each_element(prover, *LAW, node, meets_another, "biases")
            for claim in single:
                overlap = int(mean_claimed(prover, node))
                yield replace(claim, dof=claim.dof - overlap)
            if not any(c.node == node.name for c in prover.claims if c.code in ("DW005", CODE)):
                yield from common(prover, CODE, NAME, node, mean_meets_another, "biases")


def whole(prover: Prover, node: Node) -> list[ShiftClaim]:
    """The whole vector, where it meets another before it falls into parts: all gates of a recurrent cell."""
    groups = torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)
    if len(prover.parts(node)) < 2 or claimed(prover, node, groups):
        return []
    outcome = prover.walk(node.name, groups, "biases")
    taken = outcome.proved and meets_another(prover, node, outcome)
    return [make_claim(prover, CODE, NAME, node, groups, outcome)] if taken else []


def mean_meets_another(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The part that LayerNorm ignores, on a stream that is also read without one: only the sum of the means counts."""
    return bool(outcome.absorbed) and "core.layer" in ended_at(outcome)


def meets_another(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return bool(outcome.absorbed) and not passed(outcome, "aten.matmul") and not prover.has("DW004", node.name)
