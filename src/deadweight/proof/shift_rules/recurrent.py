"""Recurrent layers: every step reads the state before it behind a non-linear function."""

from __future__ import annotations

from deadweight.graph.node import Node
from deadweight.proof.opsets import RECURRENT
from deadweight.proof.shift import ShiftWalk, shift_rule
from deadweight.proof.steps import Blocked


@shift_rule(*RECURRENT)
def recurrent(walk: ShiftWalk, node: Node) -> None:
    """Gates do not ignore a shift, whether it reaches them from the input, a weight or the initial state."""
    raise Blocked(node.name, node.op, "the non-linear functions of a recurrent layer do not ignore a shift")
