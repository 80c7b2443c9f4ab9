"""Recurrent layers: every step reads the state before it behind a non-linear function. Packing picks its rows."""

from __future__ import annotations

from deadweight.graph.node import Node
from deadweight.proof.labels import constant_along
from deadweight.proof.operation_groups import RECURRENT
from deadweight.proof.shift import Shift, ShiftWalk, shift_rule, unknown_labels
from deadweight.proof.steps import Blocked


@shift_rule(*RECURRENT)
def recurrent(walk: ShiftWalk, node: Node) -> None:
    """Gates do not ignore a shift, whether it reaches them from the input, a weight or the initial state."""
    raise Blocked(node.name, node.op, "the non-linear functions of a recurrent layer do not ignore a shift")


@shift_rule("recurrent.pack")
def packing(walk: ShiftWalk, node: Node) -> list[Shift | None]:
    """It picks rows: where all rows are shifted equally, so are those it picks."""
    shift = walk.shifts[node.args[0].name]
    rows = next((user for user in walk.graph.users[node.name] if user.args[1] == 0), None)
    if rows is None:
        return [None, None]
    if not constant_along(shift.label, (0, 1)):
        return [unknown_labels(rows), None]
    label, source = (part[0, 0].expand(rows.shape) for part in (shift.label, shift.source))
    return [Shift(label, source, shift.fixed), None]
