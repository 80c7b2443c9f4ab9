"""DW008 the direction LayerNorm lost: x̂ sums to zero, so a weight's component along 1/γ adds only a constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.graph.node import Graph, Node
from deadweight.laws.prover import Prover, split_by_readers
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import make_claim, mean_claimed
from deadweight.proof.labels import compact
from deadweight.proof.reading import CentredReader, centred_input
from deadweight.proof.shift import Outcome
from deadweight.proof.steps import Step
from deadweight.proof.weights import uses_of, weight_view

CODE, NAME = "DW008", "lost-direction"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.graph.nodes.values():
        reader = centred_input(prover.graph, node)
        nodes = [] if reader is None else alike(prover.graph, reader)
        if reader is None or node.name not in nodes[:1]:
            continue
        rows = torch.arange(1, node.shape[-1] + 1)
        parameter = prover.graph.nodes[reader.weight]
        if reader.shift is None:
            why = "it reads γ·x̂, and x̂ sums to zero", "the component along 1/γ adds 0"
            steps = [Step(name, node.op, *why) for name in nodes]
            claim = make_claim(prover, CODE, NAME, parameter, rows, Outcome(steps, {}))
            yield counted(prover, replace(claim, lost=node.name))
        else:
            yield from constant(prover, nodes, parameter, rows)


def alike(graph: Graph, reader: CentredReader) -> list[str]:
    """The linear maps that use a weight, if each reads γ·x̂ + β with the same γ and β; else none."""
    uses = list(uses_of(graph, reader.weight))
    found = [centred_input(graph, graph.nodes[use]) for use in uses]
    same = all(f is not None and (f.gain, f.shift) == (reader.gain, reader.shift) for f in found)
    views = {weight_view(graph, graph.nodes[use]) for use in uses}
    return sorted(uses, key=graph.place.__getitem__) if same and len(views) == 1 else []


def constant(prover: Prover, nodes: list[str], parameter: Node, rows: torch.Tensor) -> Iterator[ShiftClaim]:
    """With a shift β the component adds the constant Σ(β/γ) to each output, which must go somewhere."""
    node = prover.graph.nodes[nodes[0]]
    for groups in output_parts(prover, nodes, rows):
        outcome = follow(prover, nodes, groups)
        if outcome.proved:
            claim = make_claim(prover, CODE, NAME, parameter, groups, outcome)
            why = "it reads γ·x̂ + β, and x̂ sums to zero: W += u(1/γ)ᵀ adds the constant u·Σ(β/γ)"
            first = replace(claim.steps[0], rule=why)
            yield counted(prover, replace(claim, steps=(first, *claim.steps[1:]), lost=node.name))


def counted(prover: Prover, claim: ShiftClaim) -> ShiftClaim:
    """Without the motion of all rows alike, where the mean over the outputs is dead already."""
    taken = claim.index is None and mean_claimed(prover, prover.graph.nodes[claim.node])
    return replace(claim, dof=claim.dof - int(taken))


def follow(prover: Prover, nodes: list[str], groups: torch.Tensor) -> Outcome:
    if len(nodes) > 1:
        return prover.walk_together(nodes, groups, "biases")
    return prover.walk(nodes[0], groups.expand(prover.graph.nodes[nodes[0]].shape), "biases")


def output_parts(prover: Prover, nodes: list[str], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """All outputs together where a bias follows; else part by part, for a fused weight without one."""
    if follow(prover, nodes, rows).proved:
        yield rows
        return
    node = prover.graph.nodes[nodes[0]]
    classes = split_by_readers(prover.graph, node, rows.expand(node.shape))
    if len(classes) > 1:
        yield from (compact(found).reshape(-1) for found in classes)
