"""DW008 the direction LayerNorm lost: x̂ sums to zero, so a weight's component along 1/γ adds only a constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.graph.node import Node
from deadweight.laws.prover import Prover, split_by_readers
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import make_claim, mean_claimed
from deadweight.proof.labels import compact
from deadweight.proof.reading import centred_reader
from deadweight.proof.shift import Outcome
from deadweight.proof.steps import Step

CODE, NAME = "DW008", "lost-direction"


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.graph.nodes.values():
        reader = centred_reader(prover.graph, node)
        if reader is None or len(prover.graph.users[reader.weight]) != 1:
            continue
        rows = torch.arange(1, node.shape[-1] + 1)
        parameter = prover.graph.nodes[reader.weight]
        if reader.shift is None:
            first = Step(node.name, node.op, "it reads γ·x̂, and x̂ sums to zero", "the component along 1/γ adds 0")
            claim = make_claim(prover, CODE, NAME, parameter, rows, Outcome([first], {}))
            yield counted(prover, replace(claim, lost=node.name))
        else:
            yield from constant(prover, node, parameter, rows)


def constant(prover: Prover, node: Node, parameter: Node, rows: torch.Tensor) -> Iterator[ShiftClaim]:
    """With a shift β the component adds the constant Σ(β/γ) to each output, which must go somewhere."""
    for groups in output_parts(prover, node, rows):
        outcome = prover.walk(node.name, groups.expand(node.shape), "biases")
        if outcome.proved:
            claim = make_claim(prover, CODE, NAME, parameter, groups, outcome)
            why = "it reads γ·x̂ + β, and x̂ sums to zero: W += u(1/γ)ᵀ adds the constant u·Σ(β/γ)"
            first = replace(claim.steps[0], rule=why)
            yield counted(prover, replace(claim, steps=(first, *claim.steps[1:]), lost=node.name))


def counted(prover: Prover, claim: ShiftClaim) -> ShiftClaim:
    """Without the motion of all rows alike, where the mean over the outputs is dead already."""
    taken = claim.index is None and mean_claimed(prover, prover.graph.nodes[claim.node])
    return replace(claim, dof=claim.dof - int(taken))


def output_parts(prover: Prover, node: Node, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """All outputs together where a bias follows; else part by part, for a fused weight without one."""
    whole = prover.walk(node.name, rows.expand(node.shape), "biases")
    if whole.proved:
        yield rows
        return
    classes = split_by_readers(prover.graph, node, rows.expand(node.shape))
    if len(classes) > 1:
        yield from (compact(found).reshape(-1) for found in classes)
