"""The search for factors per channel behind a linear map: LayerScale, and the gain of BatchNorm in eval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from deadweight.claims.claim import Title
from deadweight.claims.scale_claim import ScaleClaim
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.operation_groups import CONVOLUTIONS
from deadweight.proof.steps import Blocked, Step
from deadweight.proof.weights import WeightView, numbered, uses_of, weight_view
from deadweight.search.spaces import gain_site


def find_channel_scales(graph: Graph, law: Title, *, statistics: bool) -> Iterator[ScaleClaim]:
    """Every factor per channel behind a linear map, with stored statistics in between or without."""
    for node in graph.nodes.values():
        if node.op == "aten.mul" and node.name in graph.live:
            claim = read_back(graph, node, law)
            if claim is not None and statistics == any(graph.nodes[s.node].op == "aten.sub" for s in claim.steps):
                yield claim


class Between(Enum):
    """What may stand between a linear map and the factor, and what it does with the scale of a channel."""

    CONSTANT = "a constant per channel is added: the scale leaves a constant behind"
    SCALED = "a constant factor passes the scale on"
    BIAS = "the bias of the channel is scaled too"


@dataclass(frozen=True)
class Chain:
    """The way back from the factor to the linear map; steps in that order."""

    linear: Node
    steps: tuple[Step, ...]
    biases: tuple[str, ...]  # parameters that are added on the way
    constant: bool  # whether something constant is added on the way


def read_back(graph: Graph, product: Node, law: Title) -> ScaleClaim | None:
    """From the product back to the linear map, if nothing but constants and biases stands between."""
    inner, factor = factor_of(graph, product)
    channel = None if factor is None else long_axis(graph.nodes[factor].shape, product.shape)
    if inner is None or factor is None or channel is None:
        return None
    chain = follow_back(graph, graph.nodes[inner], channel)
    view = None if chain is None else weight_view(graph, chain.linear, rows_only=True)
    if chain is None or view is None or not is_alone(graph, chain.linear, view) or output_axis(chain.linear) != channel:
        return None
    shift = shift_behind(graph, product, channel) if chain.constant else None
    if chain.constant and shift is None:
        return None
    size = product.shape[channel]
    if graph.nodes[view.parameter].shape[view.output] != size:
        return None  # one row writes several channels
    try:
        own = gain_site(graph, factor, numbered(size)).parameter
    except Blocked:
        return None
    return ScaleClaim(
        law=law,
        node=own,
        dof=size,
        verdict="folds",
        into=(view.parameter, *chain.biases, *([shift] if shift else [])),
        steps=tuple(reversed((*undoing_steps(graph, product, chain), *chain.steps))),
        weight=view.parameter,
        output=view.output,
        biases=chain.biases,
        factor=factor,
        product=product.name,
        channel=channel,
        shift=shift,
    )


def follow_back(graph: Graph, node: Node, channel: int) -> Chain | None:
    """The chain from a node back to a linear map; None if anything but affine steps per channel stands between."""
    biases: list[str] = []
    steps: list[Step] = []
    constant = False
    while weight_view(graph, node, rows_only=True) is None:
        before = step_back(graph, node, channel)
        if before is None or len(graph.users[node.name]) != 1:
            return None
        other, between = before
        constant |= between is Between.CONSTANT
        if between is Between.BIAS:
            biases.append(parameter_behind(graph, other))
        steps.append(Step(node.name, node.op, between.value, "scaled, up to a constant of its channel", True))
        node = graph.node(next(a for a in node.args if isinstance(a, Ref) and a.name != other))
    steps.append(Step(node.name, node.op, "row c of the weight is scaled, so channel c is", "scaled", True))
    return Chain(node, tuple(steps), tuple(biases), constant)


def is_alone(graph: Graph, linear: Node, view: WeightView) -> bool:
    """Whether the map's result is read once, and its weight used once."""
    return len(graph.users[linear.name]) == 1 and len(list(uses_of(graph, view.parameter))) == 1


def undoing_steps(graph: Graph, product: Node, chain: Chain) -> tuple[Step, ...]:
    """What ends the scale: the factor; and the shift behind it, where a constant is left over."""
    words = "the factor takes up the scale of its channel"
    if not chain.constant:
        return (Step(product.name, product.op, words, "undone", None),)
    taken = graph.users[product.name][0]
    return (
        Step(taken.name, taken.op, "the shift takes the constant over", "unchanged", None),
        Step(product.name, product.op, words, "moved by a constant of its channel", True),
    )


def factor_of(graph: Graph, node: Node) -> tuple[str | None, str | None]:
    """x and γ of a product of data and parameters."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, Ref) for a in node.args):
        return None, None
    for x, g in (node.args, node.args[::-1]):
        if graph.depends[x.name][1] and graph.depends[g.name] == (True, False):
            return x.name, g.name
    return None, None


def long_axis(shape: tuple[int, ...], like: tuple[int, ...]) -> int | None:
    """The one axis of the product along which the factor varies."""
    long = [i + len(like) - len(shape) for i, n in enumerate(shape) if n > 1]
    return long[0] if len(long) == 1 and shape[long[0] - len(like)] == like[long[0]] else None


def step_back(graph: Graph, node: Node, channel: int) -> tuple[str, Between] | None:
    """The other operand of an affine operation per channel, and what it does; None: something else."""
    if node.op not in ("aten.add", "aten.sub", "aten.mul", "aten.div") or node.kwargs or len(node.args) != 2:
        return None
    data = [a for a in node.args if isinstance(a, Ref) and graph.depends[a.name][1]]
    others = [a for a in node.args if isinstance(a, Ref) and not graph.depends[a.name][1]]
    if len(data) != 1 or len(others) != 1 or (node.op in ("aten.sub", "aten.div") and node.args[0] is not data[0]):
        return None
    other = graph.node(others[0])
    elements = torch.Size(other.shape).numel()
    if elements != 1 and (elements != node.shape[channel] or long_axis(other.shape, node.shape) != channel):
        return None
    if graph.depends[other.name][0]:  # one number for all channels cannot be scaled channel by channel
        own = elements == node.shape[channel] and bool(parameter_behind(graph, other.name))
        return (other.name, Between.BIAS) if node.op == "aten.add" and own else None
    return other.name, Between.CONSTANT if node.op in ("aten.add", "aten.sub") else Between.SCALED


def parameter_behind(graph: Graph, name: str) -> str:
    """The vector parameter behind views, if it is read here alone; else nothing."""
    node = graph.nodes[name]
    while node.op in ("aten.reshape", "aten.unsqueeze", "aten.expand") and len(graph.users[node.name]) == 1:
        node = graph.node(node.args[0])
    plain = node.op == "parameter" and len(node.shape) == 1 and len(graph.users[node.name]) == 1
    return node.name if plain and len(graph.users[name]) == 1 else ""


def shift_behind(graph: Graph, product: Node, channel: int) -> str | None:
    """β, if adding it is all that is done with the product."""
    readers = graph.users[product.name]
    if len(readers) != 1 or readers[0].op != "aten.add" or readers[0].kwargs or product.name in graph.outputs:
        return None
    others = [a for a in readers[0].args if isinstance(a, Ref) and a.name != product.name]
    if len(others) != 1 or long_axis(graph.node(others[0]).shape, product.shape) != channel:
        return None
    return parameter_behind(graph, others[0].name) or None


def output_axis(node: Node) -> int:
    return 1 if node.op in CONVOLUTIONS else len(node.shape) - 1
