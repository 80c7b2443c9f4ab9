"""The search for numbers that are computed and dropped: rows of a weight whose outputs are cut off, unread places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.proof.labels import compact
from deadweight.proof.operation_groups import SHAPE, SHAPE_OF_ANOTHER
from deadweight.proof.weights import uses_of, weight_view
from deadweight.search.prover import Prover, adds_to_product, is_constant_multiple, run_shape
from deadweight.search.shifts import claimed, make_claim
from deadweight.search.spaces import numbered_outputs

BOUNDED = {"aten.slice", "aten.narrow", "aten.index", "aten.index_select"}  # with bounds that may be those of an input
Numbers = Tensor | list[Tensor]
NOTE = "for inputs of the example's sizes"


def find_unread_outputs(prover: Prover, law: Title) -> Iterator[ShiftClaim]:
    """Rows of weights, and elements of biases, that write what is cut off; the proof follows them there."""
    for node in list(prover.parameters()):
        unread = unread_elements(prover.graph, node) if is_vector(node) else unread_rows(prover.graph, node)
        if unread is None or not bool(unread.any()):
            continue
        groups = torch.where(unread, torch.arange(1, unread.numel() + 1).reshape(unread.shape), 0)
        outcome = prover.walk(node.name, groups)
        if any(step.op in BOUNDED for step in outcome.steps) and may_grow(prover.graph, node, unread):
            continue
        if outcome.proved and not outcome.absorbed and not claimed(prover, node, groups):
            yield replace(make_claim(prover, law, node, groups, outcome), note=NOTE)


def may_grow(graph: Graph, node: Node, unread: Tensor) -> bool:
    """Whether longer inputs may read more: as many rows are read as an input is long, or as it has pairs of places."""
    rows = [unread.movedim(axis, 0).flatten(1).all(1) if unread.ndim > 1 else unread for axis in range(unread.ndim)]
    read = {int((~cut).sum()) for cut in rows if bool(cut.any())}
    lengths = {n for other in graph.nodes.values() if other.op == "input" for n in lengths_of(other)}
    return any(read & {n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1, n * n} for n in lengths)


def lengths_of(node: Node) -> tuple[int, ...]:
    """The sizes of an input that may differ from call to call: all but that of its channels."""
    if not node.is_float or len(node.shape) < 2:
        return node.shape
    channel = 1 if len(node.shape) > 3 else len(node.shape) - 1
    return node.shape[:channel] + node.shape[channel + 1 :]


def unread_elements(graph: Graph, node: Node) -> Tensor:
    """True at the elements of a bias that are cut off wherever it is added. A slice of the bias itself is no cut."""
    numbers = torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)
    return ~torch.isin(numbers, numbers_added(graph, node, numbers))


def numbers_added(graph: Graph, node: Node, numbers: Tensor) -> Tensor:
    """The numbers that are read behind the sums to which a vector, or a view of it, is added."""
    found = [torch.zeros(0, dtype=torch.int64)] if node.name not in graph.outputs else [all_of(numbers)]
    for reader in graph.users[node.name]:
        if reader.op in ("aten.reshape", "aten.unsqueeze", "aten.expand"):
            found.append(numbers_added(graph, reader, run_shape(reader, numbers)))
        elif reader.op == "aten.add" and not reader.kwargs and adds_to_product(graph, reader, {node.name: numbers}):
            found.append(read_numbers(graph, reader.name, numbers.expand(reader.shape)))
        else:
            found.append(all_of(numbers))
    return torch.cat(found).unique()


def unread_rows(graph: Graph, node: Node) -> Tensor | None:
    """True at the rows of a weight whose outputs are cut off wherever the weight is used."""
    uses = [graph.nodes[name] for name in uses_of(graph, node.name)]
    views = [weight_view(graph, use, rows_only=True) for use in uses]
    view = views[0] if views else None
    if view is None or view.expert is not None or any(v != view for v in views):
        return None
    width = node.shape[view.output]
    alive = torch.zeros(width + 1, dtype=torch.bool)
    for use in uses:
        if width != use.shape[numbering_axis(use)]:
            return None
        alive[read_numbers(graph, use.name, numbered_outputs(use, width))] = True
    shape = [width if axis == view.output else 1 for axis in range(len(node.shape))]
    return ~alive[1:].reshape(shape).expand(node.shape)


def numbering_axis(node: Node) -> int:
    return len(node.shape) - 1 if node.op == "linear" else 1


def read_numbers(graph: Graph, name: str, numbers: Numbers) -> Tensor:
    """The numbers of a value that something computes with, behind operations that move, join or drop elements."""
    if name in graph.outputs:
        return all_of(numbers)
    found = [torch.zeros(0, dtype=torch.int64)]
    for reader in graph.users[name]:
        moved = moved_numbers(graph, reader, name, numbers)
        found.append(all_of(numbers) if moved is None else read_numbers(graph, reader.name, moved))
    return torch.cat(found).unique()


def all_of(numbers: Numbers) -> Tensor:
    parts = numbers if isinstance(numbers, list) else [numbers]
    present = torch.cat([compact(part).reshape(-1) for part in parts]).unique()
    return present[present != 0]


def moved_numbers(graph: Graph, reader: Node, name: str, numbers: Numbers) -> Numbers | None:
    """Where the numbers are in the result of an operation; None if it computes with them."""
    if reader.op == "getitem":
        return numbers[reader.args[1]] if isinstance(numbers, list) else None
    if isinstance(numbers, list):
        return None
    if reader.op == "aten.neg" or is_constant_multiple(graph, reader, {name: numbers}):
        return numbers.expand(reader.shape)
    if reader.op == "aten.add" and not reader.kwargs and adds_to_product(graph, reader, {name: numbers}):
        return numbers.expand(reader.shape)
    if reader.op in SHAPE - SHAPE_OF_ANOTHER and len(reader.inputs) == 1:
        moved: Any = run_shape(reader, numbers)
        return list(moved) if isinstance(moved, (list, tuple)) else moved
    return None
