"""DW013 for a table that is tied to a readout: all its rows may move along 1/γ of the norm that the readout reads.

The readout computes E·(γ·x̂ + β) + b, and x̂ sums to zero: with E + 1·vᵀ for v = c/γ every logit moves by the constant
c·Σ(β/γ), which b takes over (nothing moves where there is no β). Where E is looked up its rows move by v, which another
table or a bias that is added takes over, as for any table (DW013). One dimension, where not all vectors are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.claims.claim import Title, noted
from deadweight.claims.point import ancestors
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node
from deadweight.proof.labels import scramble
from deadweight.proof.readers import CentredReader, centred_input
from deadweight.proof.shift import Outcome, Shift, ShiftWalk
from deadweight.proof.steps import Step
from deadweight.proof.weights import WeightView, uses_of, weight_view
from deadweight.search.prover import Prover
from deadweight.search.shifts import make_claim


def find_tied_tables(prover: Prover, law: Title) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        uses = [prover.graph.nodes[use] for use in uses_of(prover.graph, node.name)] if len(node.shape) == 2 else []
        tables = [use for use in uses if use.op == "aten.embedding" and use.args[0].name == node.name]
        readouts = [use for use in uses if use.op == "linear"]
        if tables and len(readouts) == 1 and len(uses) == len(tables) + 1 and not prover.has(law, node.name):
            yield from along_lost_direction(prover, law, node, tables, readouts[0])


def along_lost_direction(
    prover: Prover, law: Title, node: Node, tables: list[Node], readout: Node
) -> Iterator[ShiftClaim]:
    """Follow both motions at once: rows that are looked up move by v, logits by a constant."""
    reader = row_reader(prover.graph, readout, node)
    if reader is None:
        return
    width = node.shape[1]
    sources = {t.name: moved(t, torch.arange(1, width + 1)) for t in tables}
    if reader.shift is not None:
        sources[readout.name] = moved(readout, torch.tensor([width + 1]))
    walk = ShiftWalk(prover.graph, prover.identity, sources, frozenset({node.name}), absorbers="biases")
    outcome = walk.run()
    affine = {p for part in (reader.gain, reader.shift) if part for p in ancestors(prover.graph, part, {})}
    if affine & {a.parameter for a, _ in outcome.absorbed.values()}:
        return  # 1/γ or Σ(β/γ) would move as well
    if outcome.proved:
        claim = make_claim(prover, law, node, torch.ones(node.shape[0], dtype=torch.int64), outcome)
        why = "the table is tied: its rows move along 1/γ of the norm that the readout reads"
        yield replace(claim, lost=readout.name, note=noted(claim, why))


def moves_readout_alone(
    prover: Prover, law: Title, table: Node, readout: Node, rows: torch.Tensor
) -> ShiftClaim | None:
    """What follows at the readout, and who takes it over, if these rows of its weight move along 1/γ."""
    reader = row_reader(prover.graph, readout, table)
    if reader is None:
        return None
    if reader.shift is None:
        step = Step(readout.name, readout.op, "it reads γ·x̂, and x̂ sums to zero", "the component along 1/γ adds 0")
        outcome = Outcome([step], {})
    else:
        outcome = prover.walk(readout.name, rows.expand(readout.shape), "biases")
    if not outcome.proved:
        return None
    return replace(make_claim(prover, law, table, rows, outcome), lost=readout.name)


def row_reader(graph: Graph, readout: Node, table: Node) -> CentredReader | None:
    """The norm that a readout reads, if each row of the table gives one logit; a transposed table gives other rows."""
    plain = weight_view(graph, readout) == WeightView(table.name, 0, 1)
    return centred_input(graph, readout) if plain else None


def moved(node: Node, numbers: torch.Tensor) -> Shift:
    """A shift by amounts of these numbers along the last axis, the same at all positions."""
    return Shift(scramble(numbers).expand(node.shape), numbers.to(torch.int32).expand(node.shape), fixed=True)
