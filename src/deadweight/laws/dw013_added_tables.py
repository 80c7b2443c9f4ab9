"""DW013 tables added together: any vector can move from all rows of one table into another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import is_vector, make_claim, mean_claimed

CODE, NAME = "DW013", "added-tables"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_table(prover, node):
            columns = torch.arange(1, node.shape[-1] + 1).expand(node.shape)
            outcome = prover.walk(node.name, columns, "biases")
            if outcome.proved and outcome.absorbed:
                claim = make_claim(prover, CODE, NAME, node, columns, outcome)
                overlap = int(mean_claimed(prover, node))
                yield replace(claim, dof=claim.dof - overlap)


def is_table(prover: Prover, node: Node) -> bool:
    """Read by rows, or added whole as one row per position."""
    readers = {r.op for r in prover.graph.users[node.name]}
    if is_vector(node):
        return "aten.embedding" in readers
    return len(node.shape) >= 2 and bool(readers & {"aten.embedding", "aten.add", "aten.expand", "aten.slice"})
