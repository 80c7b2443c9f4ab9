"""DW004 bias before statistics: a norm that subtracts the mean of a channel makes that channel's bias dead.

On running statistics (eval) nothing is subtracted that depends on the bias: it folds into the norm's own shift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deadweight.graph.node import Graph, Node, Ref
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import each_element, ended_at, grouped, is_vector, make_claim
from deadweight.proof.shift import Outcome

CODE, NAME = "DW004", "bias-before-statistics"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if not is_vector(node):
            continue
        dead = list(each_element(prover, CODE, NAME, node, is_before_statistics))
        for claim in dead or each_element(prover, CODE, NAME, node, is_before_statistics, "biases"):
            batch = any(step.op == "core.batch" for step in claim.steps)
            folded = claim.verdict == "folds"
            note = "training: batch statistics" if batch else "eval: running statistics" if folded else ""
            yield replace(claim, tier="mode" if note else "real", note=note)
        yield from group_means(prover, node)


def is_before_statistics(prover: Prover, node: Node, outcome: Outcome) -> bool:
    if not outcome.absorbed:
        return bool({"core.batch", "core.instance", "core.group"} & ended_at(outcome))
    return any(subtracts_statistics(prover.graph, s.node) for s in outcome.steps)


def subtracts_statistics(graph: Graph, name: str) -> bool:
    """x − μ with a μ that is stored, as BatchNorm computes it in eval."""
    node = graph.nodes[name]
    centre = graph.nodes[node.args[1].name] if node.op == "aten.sub" and isinstance(node.args[1], Ref) else None
    return centre is not None and centre.op == "aten.reshape" and graph.nodes[centre.args[0].name].op == "buffer"


def group_means(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """GroupNorm: only the mean over each group is dead."""
    blocked = [o.blocked for _, o in prover.blocked.get(node.name, []) if o.blocked and o.blocked.op == "core.group"]
    if not blocked or prover.has(CODE, node.name):
        return
    groups = grouped(int(prover.graph.nodes[blocked[0].node].args[1]), node)
    outcome = prover.walk(node.name, groups)
    if outcome.proved and not outcome.absorbed:
        yield make_claim(prover, CODE, NAME, node, groups, outcome)
