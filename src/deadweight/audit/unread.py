"""Rows of tables that no drawn input reads: they have no gradient, which does not say that they are redundant.

A table may have more rows than there are words to draw: a row for the start of a sequence, or for positions that a
short example does not reach. A row that is proved to be out of reach is redundant, and none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.audit.jacobian import JacobianRows
from deadweight.claims.claim import Claim
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph
from deadweight.proof.weights import uses_of


def unread_rows(rows: JacobianRows, jacobian: Float64[Tensor, "m p"], claims: Sequence[Claim]) -> Tensor:
    """The parameters in such rows, as far as these rows of the Jacobian show."""
    result = torch.zeros(jacobian.shape[1], dtype=torch.bool)
    proved = proved_unread(claims)
    start = 0
    for name, size in zip(rows.order, rows.sizes, strict=True):
        if is_looked_up(rows.graph, name):
            shape = rows.values[name].shape
            silent = (jacobian[:, start : start + size] == 0).all(0).reshape(shape).all(1)
            if not bool(silent.all()):  # else the whole table has no effect: a law must say so
                silent &= ~proved.get(name, torch.zeros_like(silent))
                result[start : start + size] = silent.repeat_interleave(shape[1])
        start += size
    return result


def is_looked_up(graph: Graph, name: str) -> bool:
    """Whether data picks rows of a parameter, and nothing else reads it."""
    uses = [graph.nodes[use] for use in uses_of(graph, name)]
    return bool(uses) and all(
        use.op == "aten.embedding" and use.args[0].name == name and graph.depends[use.args[1].name][1] for use in uses
    )


def proved_unread(claims: Sequence[Claim]) -> dict[str, Tensor]:
    """By parameter, the rows that a proof says no input can reach."""
    result: dict[str, Tensor] = {}
    for name, rows in each_proved(claims):
        result[name] = result[name] | rows if name in result else rows
    return result


def each_proved(claims: Sequence[Claim]) -> Iterator[tuple[str, Tensor]]:
    for claim in claims:
        if isinstance(claim, ShiftClaim) and claim.unread and claim.groups.ndim == 2:
            yield claim.node, (claim.groups != 0).all(1)
