"""From claims about the traced graph to findings about the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deadweight.audit.finding import Finding, Pieces, Unknown, Visit
from deadweight.audit.names import by_name
from deadweight.audit.walk import walk_graph
from deadweight.claims.claim import Claim
from deadweight.graph.node import Graph
from deadweight.proof.opsets import SHAPE
from deadweight.proof.steps import Step
from deadweight.source.blocks import Blocks
from deadweight.source.model import Source


def to_finding(graph: Graph, claim: Claim) -> Finding:
    """The claim in terms of state-dict names."""
    shape = graph.nodes[claim.node].shape
    total = torch.Size(shape).numel()
    return Finding(
        code=claim.code,
        law=claim.name,
        parameter=graph.parameters[claim.node],
        slice=stored_slice(graph, claim),
        elements=total if claim.index is None else total // shape[claim.axis] * len(claim.index),
        dof=claim.dof,
        verdict=claim.verdict,
        into=tuple(dict.fromkeys(graph.parameters[name] for name in claim.into if name in graph.parameters)),
        tier=claim.tier,
        proof=tuple(readable(graph, claim.steps)),
        note=claim.note,
        walk=walk_graph(graph, claim.steps),
    )


def stored_slice(graph: Graph, claim: Claim) -> Pieces | None:
    """The part of the stored parameter along its first axis, as ranges; None for all of it."""
    shape = graph.nodes[claim.node].shape
    along = claim.axis == 0 or is_vector(shape)
    piece = graph.pieces.get(claim.node)
    if piece is None or not shape:
        return pieces(claim.index) if along else None
    start, stop = piece.ranges[0]
    if not along or claim.index is None or piece.axis(claim.axis) != 0:
        return ((start, stop),)
    return pieces(claim.index + start)


def readable(graph: Graph, steps: Sequence[Step]) -> Iterator[str]:
    """One line per step; consecutive operations that only move elements are one line."""
    moves = 0
    for step in steps:
        if step.op in SHAPE:
            moves += 1
            continue
        if moves:
            yield f"{moves} operation{'s' if moves > 1 else ''} that only move elements → no element changes"
            moves = 0
        yield by_name(graph, str(step), step.node)


def is_vector(shape: tuple[int, ...]) -> bool:
    return sum(n > 1 for n in shape) <= 1


def pieces(index: Tensor | None) -> Pieces | None:
    """Runs of consecutive indices; None for all of them."""
    if index is None or not len(index):
        return None
    breaks = torch.nonzero(index[1:] != index[:-1] + 1).reshape(-1) + 1
    runs = torch.tensor_split(index, breaks)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))


def expand(source: Source, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Repeat a finding about a kept block for every block that it represents."""
    expanded = list(findings)
    for blocks in source.blocks:
        expanded = [f for finding in expanded for f in over_blocks(blocks, finding, source)]
    yield from expanded


def over_blocks(blocks: Blocks, finding: Finding, source: Source) -> Iterator[Finding]:
    home = blocks.index_in(finding.parameter)
    touched = {i for name in finding.into if (i := blocks.index_in(name)) is not None}
    spread = touched | ({home} if home is not None else set())
    if home is None or len(spread) > 2:
        yield replace(finding, into=tuple(everywhere(blocks, finding.into, source)))
        return
    for index in blocks.represented(home):
        offset = index - home
        yield replace(
            finding,
            parameter=blocks.shifted(finding.parameter, offset),
            into=tuple(name for n in finding.into if (name := blocks.shifted(n, offset)) in source.shapes),
            proof=tuple(blocks.shifted(line, offset) for line in finding.proof),
            walk=tuple(shift_visit(blocks, visit, offset) for visit in finding.walk) if offset else finding.walk,
        )


def shift_visit(blocks: Blocks, visit: Visit, offset: int) -> Visit:
    """The same step in another block."""
    return replace(
        visit,
        node=blocks.shifted(visit.node, offset),
        rule=blocks.shifted(visit.rule, offset),
        conclusion=blocks.shifted(visit.conclusion, offset),
        parameters=tuple(blocks.shifted(name, offset) for name in visit.parameters),
    )


def everywhere(blocks: Blocks, names: tuple[str, ...], source: Source) -> Iterator[str]:
    """The parameters of a finding about the whole residual stream, in every block."""
    seen: dict[str, None] = {}
    for name in names:
        index = blocks.index_in(name)
        if index is None:
            seen[name] = None
            continue
        for i in blocks.represented(index):
            seen[blocks.moved(name, i)] = None
    yield from seen


def everywhere_unknown(source: Source, unknowns: Iterable[Unknown]) -> Iterator[Unknown]:
    """Repeat an unknown about a kept block for every block that it represents."""
    expanded = list(unknowns)
    for blocks in source.blocks:
        spread = []
        for unknown in expanded:
            home = blocks.index_in(unknown.parameter)
            places = [] if home is None else blocks.represented(home)
            spread += [replace(unknown, parameter=blocks.moved(unknown.parameter, i)) for i in places] or [unknown]
        expanded = spread
    yield from expanded
