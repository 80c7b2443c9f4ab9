"""DW001 unused: no path leads from the parameter, or from a row of a table, to the output."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim

CODE, NAME = "DW001", "unused"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    graph = prover.graph
    for name in graph.parameters:
        node = graph.nodes[name]
        if not graph.users[name] and name not in graph.outputs:
            yield claim(node, everything(node), ("no operation on the way to the output reads it",), "")
            continue
        for reader in graph.users[name]:
            if reader.op == "aten.embedding" and len(graph.users[name]) == 1:
                yield from unread_rows(prover, node, reader)


def everything(node: Node) -> torch.Tensor:
    return torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)


def unread_rows(prover: Prover, node: Node, reader: Node) -> Iterator[ShiftClaim]:
    """Rows before the first that any position reads; or all but one, where every position reads the same row."""
    rows = constant_value(prover.graph, reader.args[1].name)
    if rows is None or rows.numel() < 2:
        return
    low, high = int(rows.min()), int(rows.max())
    unread = torch.zeros(node.shape[0], dtype=torch.bool)
    unread[:low] = True
    if low == high:
        unread[high + 1 :] = True
    if unread.any():
        groups = torch.where(unread.reshape(-1, 1), everything(node), 0)
        why = f"{reader.name} [aten.embedding]: the rows it reads do not depend on the input, and start at {low}"
        yield claim(node, groups, (why,), "in a plain forward pass: padded positions or given ids may read these rows")


def claim(node: Node, groups: torch.Tensor, proof: tuple[str, ...], note: str) -> ShiftClaim:
    whole = bool((groups != 0).all())
    return ShiftClaim(
        code=CODE,
        name=NAME,
        node=node.name,
        dof=int((groups != 0).sum()),
        verdict="dead",
        tier="bitwise",
        elements=None if whole else torch.nonzero(groups.reshape(-1)).reshape(-1),
        proof=proof,
        note=note,
        groups=groups,
    )
