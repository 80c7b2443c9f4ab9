"""Who reads what: linear maps behind a LayerNorm, parameters behind views, gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.weights import uses_of, weight_view

KEEPS_LAST_AXIS = {"aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.slice", "aten.select", "aten.reshape"}
KEEPS_LAST_AXIS |= {"aten.transpose", "aten.permute", "aten.index", "aten.index_select", "aten.repeat_interleave"}


@dataclass(frozen=True)
class CentredReader:
    """A linear map, or one for each expert, that reads γ·x̂ + β: x̂ sums to zero along the axis that is contracted."""

    weight: str  # parameter node
    core: str
    gain: str | None  # node of γ, a function of parameters alone; None: 1
    shift: str | None  # node of β; None: 0


def centred_reader(graph: Graph, node: Node) -> CentredReader | None:
    """The LayerNorm behind a linear map, if its input is that LayerNorm's output and its weight is used once."""
    found = centred_input(graph, node)
    return None if found is None or len(list(uses_of(graph, found.weight))) != 1 else found


def centred_input(graph: Graph, node: Node) -> CentredReader | None:
    """The LayerNorm behind a linear map, if its input is that LayerNorm's output and nothing else."""
    view = weight_view(graph, node) if node.op in ("linear", EXPERTS) else None
    if view is None:
        return None
    name, gain, shift = skip_shape(graph, node.args[0].name), None, None
    name, shift = peel(graph, name, "aten.add")
    name, gain = peel(graph, skip_shape(graph, name), "aten.mul")
    core = graph.nodes[skip_shape(graph, name)]
    if core.op != "core.layer" or core.args[1] != 1:
        return None
    return CentredReader(view.parameter, core.name, gain, shift)


def skip_shape(graph: Graph, name: str) -> str:
    """Back through operations that leave the last axis as it is."""
    node = graph.nodes[name]
    while (node.op in KEEPS_LAST_AXIS or node.op == "getitem") and node.args and isinstance(node.args[0], Ref):
        before = graph.nodes[node.args[0].name]
        before = graph.node(before.args[0]) if before.op == "recurrent.pack" and node.args[1] == 0 else before
        if not before.shape or not node.shape or before.shape[-1] != node.shape[-1] or moves_last(graph, node, before):
            break
        node = before
    return node.name


def moves_last(graph: Graph, node: Node, before: Node) -> bool:
    rank = len(before.shape)
    if node.op == "aten.transpose":
        return rank - 1 in (node.args[1] % rank, node.args[2] % rank)
    if node.op == "aten.permute":
        return node.args[1][-1] % rank != rank - 1
    if node.op in ("aten.slice", "aten.select", "aten.index_select"):
        return (node.args[1] if len(node.args) > 1 else 0) % rank == rank - 1
    if node.op == "aten.repeat_interleave":
        axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        return axis is None or axis % rank == rank - 1
    if node.op == "aten.index":
        return picks_along_last(graph, node, rank)
    return False


def picks_along_last(graph: Graph, node: Node, rank: int) -> bool:
    """Whether an index is meant for the last axis; a mask stands for as many axes as it has."""
    found = [None if i is None else graph.node(i) for i in node.args[1]]
    axes = [len(i.shape) if i is not None and i.dtype == torch.bool else 1 for i in found]
    return sum(axes) >= rank and found[-1] is not None


def peel(graph: Graph, name: str, op: str) -> tuple[str, str | None]:
    """x and p if the node is x op p with p made of parameters alone, along the last axis; else the node itself."""
    node = graph.nodes[name]
    if node.op != op or node.kwargs or len(node.args) != 2 or not all(isinstance(a, Ref) for a in node.args):
        return name, None
    for x, p in (node.args, node.args[::-1]):
        if is_vector_of_parameters(graph, p.name, node.shape) and graph.depends[x.name][1]:
            return x.name, p.name
    return name, None


def is_vector_of_parameters(graph: Graph, name: str, like: tuple[int, ...]) -> bool:
    """Made of parameters and constants, and varying along the last axis only."""
    shape = graph.nodes[name].shape
    parameters, data = graph.depends[name]
    return parameters and not data and bool(shape) and shape[-1] == like[-1] and all(n == 1 for n in shape[:-1])
