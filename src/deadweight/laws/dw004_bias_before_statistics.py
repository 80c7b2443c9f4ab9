"""DW004 bias before statistics: a norm that subtracts the mean of a channel makes that channel's bias dead.

On running statistics (eval) nothing is subtracted that depends on the bias: it folds into the norm's own shift, and the
norm's gain, with it the whole norm, folds into the layer before it. Of a weight that is standardised itself the mean of
every row that is centred is dead. So is a bias that both sides of a difference carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.claims.claim import Claim, Title, noted
from deadweight.claims.scale_claim import ScaleClaim
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node, Ref, is_vector
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.operation_groups import DISTANCES
from deadweight.proof.shift import Outcome
from deadweight.rewrite.rewrite import Rewrite
from deadweight.rewrite.scales import FoldScale
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.channel_scales import find_channel_scales
from deadweight.search.normalised_weight import candidates, changed_before_use
from deadweight.search.prover import Prover
from deadweight.search.shifts import CENTRES, all_claimed, common, each_element, ended_at, grouped, make_claim

TITLE = Title("DW004", "bias-before-statistics")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if not is_vector(node):
            yield from weight_means(prover, node)
            continue
        dead = list(each_element(prover, TITLE, node, is_before_statistics))
        for claim in dead or each_element(prover, TITLE, node, is_before_statistics, "biases"):
            batch = any(step.op == "core.batch" for step in claim.steps)
            folded = claim.verdict == "folds"
            note = "training: batch statistics" if batch else "eval: running statistics" if folded else ""
            yield replace(claim, tier="mode" if note else "real", note=noted(claim, note))
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
    if not blocked or prover.has(TITLE, node.name):
        return
    groups = grouped(int(prover.graph.nodes[blocked[0].node].args[1]), node)
    outcome = prover.walk(node.name, groups)
    if outcome.proved and not outcome.absorbed:
        yield make_claim(prover, TITLE, node, groups, outcome)


def weight_means(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """What a weight writes alike to a group of channels, at all their places, has no effect behind GroupNorm.

    So of an embedding of time, added to an image, one dimension for each group and each number that the map reads.
    """
    graph = prover.graph
    if len(node.shape) != 2 or {r.op for r in graph.users[node.name]} != {"linear"} or prover.surely_alive(node.name):
        return
    rows, columns = node.shape
    for count in sorted({int(n.args[1]) for n in graph.nodes.values() if n.op == "core.group"}):
        if rows % count or rows == count:
            continue
        of_row = torch.arange(count).repeat_interleave(rows // count)
        groups = of_row[:, None] * columns + torch.arange(columns) + 1
        outcome = prover.attempt(node.name, groups)
        if outcome.proved and not outcome.absorbed and "core.group" in ended_at(outcome):
            yield make_claim(prover, TITLE, node, groups, outcome)
            return


def find_centred_weights(prover: Prover) -> Iterator[ShiftClaim]:
    """Weights that are standardised themselves: the mean of every row that a norm centres is dead."""
    for node in changed_before_use(prover):
        taken = any(claim.node == node.name for claim in prover.claims)
        for parts in () if taken or is_vector(node) else candidates(node):
            outcome = prover.attempt(node.name, parts)
            if outcome.proved and ended_at(outcome) & {*CENTRES, "aten.sub"}:
                yield make_claim(prover, TITLE, node, parts, outcome)
                break


def find_differences(prover: Prover) -> Iterator[ShiftClaim]:
    """What both sides of a difference carry: two inputs of one encoder, a value and its neighbour, mean or maximum."""
    if not any(node.op in DIFFERENCES for node in prover.graph.nodes.values()):
        return
    for node in prover.parameters():
        if all_claimed(prover, node):
            continue
        single = list(each_element(prover, TITLE, node, cancels)) if is_vector(node) else []
        yield from single or common(prover, TITLE, node, cancels)


def cancels(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The shift is gone behind a difference, a distance, or a spread."""
    return not outcome.absorbed and bool(DIFFERENCES & ended_at(outcome))


DIFFERENCES = {"aten.sub", "aten.diff", "aten.std", "aten.var", *DISTANCES}


def find_batch_gains(prover: Prover) -> Iterator[ScaleClaim]:
    """In eval a BatchNorm's gain, and with it the whole norm, folds into the layer before it."""
    for claim in find_channel_scales(prover.graph, TITLE, statistics=True):
        yield replace(claim, tier="mode", note="eval: running statistics")


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    return FoldScale(graph=graph, claim=claim) if isinstance(claim, ScaleClaim) else rewrite_shift(graph, claim)


LAW = Law(
    title=TITLE,
    fix="build the layer in front of the norm with bias=False",
    searches=(
        Search(50, find),
        Search(70, find_centred_weights),
        Search(72, find_differences),
        Search(170, find_batch_gains),
    ),
    rewriting=Rewriting(order=60, make=make_rewrite),
    tiers=("real", "mode"),
    avoidable=True,
)
