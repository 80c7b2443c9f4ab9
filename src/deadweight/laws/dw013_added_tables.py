"""DW013 tables added together: any vector can move from all rows of one table into another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Node, is_vector
from deadweight.laws.law import Kept, Law, Search
from deadweight.search.paired_rows import find_paired_rows
from deadweight.search.prover import Prover
from deadweight.search.shifts import make_claim, mean_claimed
from deadweight.search.tied_table import find_tied_tables

TITLE = Title("DW013", "added-tables")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if is_table(prover, node):
            columns = torch.arange(1, node.shape[-1] + 1).expand(node.shape)
            outcome = prover.walk(node.name, columns, "biases")
            if outcome.proved and outcome.absorbed:
                claim = make_claim(prover, TITLE, node, columns, outcome)
                overlap = int(mean_claimed(prover, node))
                yield replace(claim, dof=claim.dof - overlap)


def is_table(prover: Prover, node: Node) -> bool:
    """Read by rows, or added whole as one row per position."""
    readers = {r.op for r in prover.graph.users[node.name]}
    if is_vector(node):
        return "aten.embedding" in readers
    return len(node.shape) >= 2 and bool(readers & {"aten.embedding", "aten.add", "aten.expand", "aten.slice"})


LAW = Law(
    title=TITLE,
    fix="leave out a table that is always read at the same row; else leave it: one row",
    searches=(
        Search(100, find),
        Search(110, partial(find_tied_tables, law=TITLE)),
        Search(120, partial(find_paired_rows, law=TITLE)),
    ),
    rewriting=Kept("a vector would move from one table to the other, and both stay as large"),
)
