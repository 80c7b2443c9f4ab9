"""From claims about the traced graph to findings about the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deadweight.audit.names import by_name, place_of
from deadweight.audit.result import Finding, Pieces, Unknown, Visit
from deadweight.audit.walk import walk_graph
from deadweight.claims.claim import Claim
from deadweight.graph.node import Graph, Piece
from deadweight.proof.operation_groups import SHAPE
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
    if piece.views:
        return stored_rows(piece, claim)
    start, stop = piece.ranges[0]
    if not along or claim.index is None or piece.axis(claim.axis) != 0:
        return ((start, stop),)
    return pieces(claim.index + start)


def stored_rows(piece: Piece, claim: Claim) -> Pieces | None:
    """The rows of the stored parameter that hold the part of a piece in another form; None for all of a whole one."""
    if claim.index is not None:
        return pieces(torch.tensor(piece.rows(claim.axis, claim.index)))
    return None if piece.whole else (piece.ranges[0],)


def readable(graph: Graph, steps: Sequence[Step]) -> Iterator[str]:
    """One line per step; consecutive operations that only move elements are one line."""
    moves = 0
    for step in steps:
        if step.op in SHAPE:
            moves += 1
            continue
        if moves:
            what = (
                "1 operation that only moves elements" if moves == 1 else f"{moves} operations that only move elements"
            )
            yield f"{what} → the same values, in other places"
            moves = 0
        yield f"{place_of(graph, step.node)} [{step.op}]: {by_name(graph, f'{step.rule} → {step.conclusion}')}"


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
        proof = tuple(in_block(blocks, line, None, 0) for line in finding.proof)
        walk = tuple(visit_in_block(blocks, visit, None, 0) for visit in finding.walk)
        yield replace(finding, into=tuple(everywhere(blocks, finding.into, source)), proof=proof, walk=walk)
        return
    for index in blocks.represented(home):
        offset = index - home
        yield replace(
            finding,
            parameter=blocks.shifted(finding.parameter, offset),
            into=tuple(name for n in finding.into if (name := blocks.shifted(n, offset)) in source.shapes),
            proof=tuple(in_block(blocks, line, home, offset) for line in finding.proof),
            walk=tuple(visit_in_block(blocks, visit, home, offset) for visit in finding.walk),
        )


def in_block(blocks: Blocks, line: str, home: int | None, offset: int) -> str:
    """A step of a proof about one block, for another block."""
    place, bracket, words = line.partition(" [")
    return place_in_block(blocks, place, home, offset) + blocks.shifted(bracket + words, offset)


def visit_in_block(blocks: Blocks, visit: Visit, home: int | None, offset: int) -> Visit:
    """The same step in another block."""
    return replace(
        visit,
        node=place_in_block(blocks, visit.node, home, offset),
        rule=blocks.shifted(visit.rule, offset),
        conclusion=blocks.shifted(visit.conclusion, offset),
        parameters=tuple(blocks.shifted(name, offset) for name in visit.parameters),
    )


def place_in_block(blocks: Blocks, place: str, home: int | None, offset: int) -> str:
    """A parameter, or a module and its line of code, for another block: the module of `home` moves by `offset`.

    Blocks were cut out of the model, so that the number of any other block is known only where neither it nor `home`
    stands for several; else it is written as *.
    """
    head = re.match(rf"{re.escape(blocks.path)}\.(\d+)(?=[.,].*:\d+$)", place)
    if head is None:
        return blocks.shifted(place, offset)
    index, alike = int(head[1]), blocks.represented(int(head[1]))
    known = len(alike) == 1 and (home is None or len(blocks.represented(home)) == 1)
    number = str(index + offset) if index == home else str(alike[0]) if known else "*"
    return f"{blocks.path}.{number}{blocks.shifted(place[head.end() :], offset)}"


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
