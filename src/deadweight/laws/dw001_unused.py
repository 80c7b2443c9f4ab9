"""DW001 unused: no path leads from the parameter, or from a row of a table, to the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.constants import constant_value, lower_bound
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.laws.law import Kept, Law, Search
from deadweight.proof.elements_read import elements_read
from deadweight.proof.steps import Step
from deadweight.search.prover import Prover
from deadweight.search.shifts import make_claim, part

TITLE = Title("DW001", "unused")
LONG = 1024  # positions at least: rows that no sequence as long as this or as the table reads count as unread


def find(prover: Prover) -> Iterator[ShiftClaim]:
    graph = prover.graph
    for name in graph.parameters:
        node = graph.nodes[name]
        if not node.is_float or 0 in node.shape:
            continue
        if not graph.users[name] and name not in graph.outputs:
            yield claim(
                node, everything(node), "no operation on the way to the output reads it", "for inputs like the example"
            )
            continue
        for reader in graph.users[name]:
            if reader.op == "aten.embedding" and len(graph.users[name]) == 1:
                yield from unread_rows(prover, node, reader)


def everything(node: Node) -> torch.Tensor:
    return torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)


def unread_rows(prover: Prover, node: Node, reader: Node) -> Iterator[ShiftClaim]:
    """Rows that no position of a sequence of any length reads, and rows below every index that can occur."""
    unread = torch.zeros(node.shape[0], dtype=torch.bool)
    index = reader.args[1].name
    low = lower_bound(prover.graph, index) or 0
    unread[: min(max(low, 0), len(unread))] = True
    longer = constant_value(prover.graph, index, stretch=max(LONG, len(unread) + 8))
    if longer is not None:
        unread |= ~torch.isin(torch.arange(len(unread)), longer)
    if unread.any():
        groups = torch.where(unread.reshape(-1, 1), everything(node), 0)
        why = f"no index that {reader.name} can be given names these {int(unread.sum())} rows"
        yield claim(node, groups, why, "in a plain forward pass: padded positions or given ids may read these rows")


def find_unread_parts(prover: Prover, *, vectors: bool) -> Iterator[ShiftClaim]:
    """Rows of a weight, and elements of a bias, whose results are cut away before anything computes with them.

    A bias comes last: what other laws say of all its elements is worth more, since `reduce` takes it out.
    """
    for name, read in prover.remember(unread_parts).items():
        node = prover.graph.nodes[name]
        if is_vector(node) == vectors:
            groups = torch.where(read | already_claimed(prover, node), 0, everything(node))
            if bool(groups.any()):
                why = f"what {int((groups != 0).sum())} of its elements write is cut away unread"
                found, outcome = (
                    claim(node, groups, why, "for inputs of the example's sizes"),
                    prover.walk(name, groups),
                )
                yield replace(found, steps=tuple(outcome.steps)) if outcome.proved else found


def already_claimed(prover: Prover, node: Node) -> torch.Tensor:
    """The elements of a parameter that an earlier law makes redundant one by one."""
    result = torch.zeros(node.shape, dtype=torch.bool)
    for earlier in prover.claims:
        if earlier.node == node.name and isinstance(earlier, ShiftClaim):
            result |= (earlier.groups != 0) & element_wise(earlier)
        elif earlier.node == node.name:
            moving = torch.arange(node.shape[earlier.axis]) if earlier.index is None else earlier.index
            result.index_fill_(earlier.axis, moving, value=True)
    return result


def unread_parts(prover: Prover) -> dict[str, torch.Tensor]:
    """Of the parameters of which only a part is read: which elements."""
    nodes = prover.graph.nodes
    masks = elements_read(prover.graph).items()
    return {name: read for name, read in masks if nodes[name].op == "parameter" and nodes[name].is_float}


def claim(node: Node, groups: torch.Tensor, why: str, note: str) -> ShiftClaim:
    axis, index = part(node, groups)
    return ShiftClaim(
        law=TITLE,
        node=node.name,
        dof=int((groups != 0).sum()),
        verdict="dead",
        tier="bitwise",
        index=index,
        axis=axis,
        steps=(Step(node.name, node.op, why, "nothing follows"),),
        note=note,
        groups=groups,
        unread=True,
    )


def find_masked(prover: Prover) -> Iterator[ShiftClaim]:
    """Elements of a weight that a constant mask multiplies by 0, or that triu or tril leave out."""
    for node in list(prover.parameters()):
        groups = masked_out(prover.graph, node)
        if groups is not None:
            outcome = prover.walk(node.name, groups)
            if outcome.proved:
                yield make_claim(prover, TITLE, node, groups, outcome)


def masked_out(graph: Graph, node: Node) -> torch.Tensor | None:
    """The elements of a parameter that no mask lets through, numbered from 1; None if there is no mask."""
    readers = graph.users[node.name]
    if not readers or node.name in graph.outputs or not all(r.op in MASKS for r in readers):
        return None
    alive = torch.zeros(node.shape, dtype=torch.bool)
    for reader in readers:
        let_through = elements_let_through(graph, node, reader)
        if let_through is None:
            return None
        alive |= let_through
    return None if bool(alive.all()) else torch.where(alive, 0, everything(node))


MASKS = {"aten.mul", "aten.triu", "aten.tril"}


def elements_let_through(graph: Graph, node: Node, reader: Node) -> torch.Tensor | None:
    """Which elements reach the result of one reader; None if that is not known."""
    if reader.op != "aten.mul":
        assert reader.target is not None
        return reader.target(torch.ones(node.shape), *reader.args[1:], **reader.kwargs) != 0
    others = [name for name in reader.inputs if name != node.name]
    mask = constant_value(graph, others[0]) if len(reader.inputs) == 2 and len(others) == 1 else None
    if mask is None or torch.broadcast_shapes(mask.shape, node.shape) != node.shape:
        return None
    return (mask != 0).expand(node.shape)


LAW = Law(
    title=TITLE,
    fix="delete the module, or return the output that was meant to use it",
    searches=(
        Search(10, find),
        Search(11, partial(find_unread_parts, vectors=False)),
        Search(12, find_masked),
        Search(275, partial(find_unread_parts, vectors=True)),
    ),
    rewriting=Kept("unused only for the inputs that were traced; other inputs may read it"),
    tiers=("bitwise", "real"),
    avoidable=True,
)
