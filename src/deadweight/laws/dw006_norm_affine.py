"""DW006 norm gain and shift: what a norm multiplies by and adds, its linear readers can do themselves.

The shift is a shift proof; the gain is a basis proof (a diagonal one) and lives in the same file.
"""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import each_norm_shift, passed
from deadweight.proof.shift import Outcome

CODE, NAME = "DW006", "norm-affine"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    return each_norm_shift(prover, CODE, NAME, readers_take_it)


def readers_take_it(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """Every absorber stands right behind a linear map that reads the norm."""
    return bool(outcome.absorbed) and not on_residual_path(prover, outcome)


def on_residual_path(prover: Prover, outcome: Outcome) -> bool:
    """Whether some absorber met the shift itself, not a linear image of it."""
    linear_seen = passed(outcome, "linear")
    direct = [a for a, _ in outcome.absorbed.values() if a.kind != "lost" and not behind_linear(prover, a.node)]
    return bool(direct) or (not linear_seen and not any(a.kind == "lost" for a, _ in outcome.absorbed.values()))


def behind_linear(prover: Prover, name: str) -> bool:
    node = prover.graph.nodes[name]
    return any(prover.graph.nodes[n].op in ("linear", "aten.conv1d", "aten.conv2d") for n in node.inputs)
