"""A factor per channel behind a linear map: the map's own rows can do what the factor does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.laws.claim import Claim, normal
from deadweight.laws.point import Motion, Point, Values
from deadweight.laws.spaces import gain_site
from deadweight.proof.opsets import CONVOLUTIONS
from deadweight.proof.steps import Blocked, Step
from deadweight.proof.weights import numbered, uses_of, weight_view


@dataclass(frozen=True, kw_only=True)
class ScaleClaim(Claim):
    """γ·(a·(Wx + b) + k) + β: row c of W and b times s, γ_c over s, and β_c takes up what k loses.

    `node` is γ's parameter and `factor` the node of its value (they differ where γ = 1 + w).
    """

    weight: str
    output: int  # the weight's axis of channels
    biases: tuple[str, ...]
    factor: str
    product: str  # the node that multiplies by γ
    channel: int  # its axis of channels
    shift: str | None  # β's parameter; None where nothing constant is added before γ

    def motions(self, point: Point) -> Iterator[Motion]:
        for c in range(self.dof):
            yield self.scaled(point, torch.eye(self.dof, dtype=torch.float64)[c])

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.scaled(point, normal(generator, self.dof))

    def scaled(self, point: Point, rates: Tensor) -> Motion:
        """Channel c grows at its rate."""
        gain = point.value(self.factor).reshape(-1)
        motion: Motion = {self.weight: point.values[self.weight] * self.along_channels(point, rates)}
        motion |= {b: point.values[b] * rates for b in self.biases}
        motion[self.node] = -(gain * rates).reshape(point.values[self.node].shape)
        if self.shift is not None:
            motion[self.shift] = (self.offset(point) * rates).reshape(point.values[self.shift].shape)
        return motion

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """Every channel times a factor of its own, undone in the gain."""
        s = torch.rand(self.dof, generator=generator, dtype=torch.float64) + 0.5
        values, gain = point.values, point.value(self.factor).reshape(-1)
        moved = {self.weight: values[self.weight] * self.along_channels(point, s)}
        moved |= {bias: values[bias] * s for bias in self.biases}
        moved[self.node] = values[self.node] + (gain / s - gain).reshape(values[self.node].shape)
        if self.shift is not None:
            taken = self.offset(point) * (1 - 1 / s)
            moved[self.shift] = values[self.shift] + taken.reshape(values[self.shift].shape)
        return moved

    def along_channels(self, point: Point, factors: Tensor) -> Tensor:
        return factors.reshape([-1 if a == self.output else 1 for a in range(point.values[self.weight].ndim)])

    def offset(self, point: Point) -> Tensor:
        """γ·k: what the product is, per channel, when the linear map and its biases give nothing."""
        linear = point.graph.nodes[self.steps[0].node]
        silent = point.at({b: torch.zeros_like(point.values[b]) for b in self.biases})
        nothing = torch.zeros(linear.shape, dtype=torch.float64)
        found = silent.value(self.product, {linear.name: nothing}).movedim(self.channel, 0)
        return found.reshape(found.shape[0], -1)[:, 0]


def scale_claims(graph: Graph, code: str, name: str, *, statistics: bool) -> Iterator[ScaleClaim]:
    """Every factor per channel behind a linear map, with stored statistics in between or without."""
    for node in graph.nodes.values():
        if node.op == "aten.mul" and node.name in graph.live:
            claim = read_back(graph, node, code, name)
            if claim is not None and statistics == any(graph.nodes[s.node].op == "aten.sub" for s in claim.steps):
                yield claim


def read_back(graph: Graph, product: Node, code: str, name: str) -> ScaleClaim | None:
    """From the product back to the linear map, if nothing but constants and biases stands between."""
    inner, factor = factor_of(graph, product)
    channel = None if factor is None else long_axis(graph.nodes[factor].shape, product.shape)
    if inner is None or factor is None or channel is None:
        return None
    size = product.shape[channel]
    biases: list[str] = []
    steps = [Step(product.name, product.op, "the factor takes up the scale of its channel", "undone", None)]
    node, constant = graph.nodes[inner], False
    while weight_view(graph, node, rows_only=True) is None:
        before = step_back(graph, node, channel)
        if before is None or len(graph.users[node.name]) != 1:
            return None
        other, words = before
        constant |= words == CONSTANT
        if words == BIAS:
            biases.append(parameter_behind(graph, other))
        steps.append(Step(node.name, node.op, words, "scaled, up to a constant of its channel", True))
        node = graph.node(next(a for a in node.args if isinstance(a, Ref) and a.name != other))
    view = weight_view(graph, node, rows_only=True)
    alone = view is not None and len(graph.users[node.name]) == 1 and len(list(uses_of(graph, view.parameter))) == 1
    if view is None or not alone or output_axis(node) != channel or "" in biases:
        return None
    steps.append(Step(node.name, node.op, "row c of the weight is scaled, so channel c is", "scaled", True))
    shift = shift_behind(graph, product, channel) if constant else None
    if constant and shift is None:
        return None
    try:
        own = gain_site(graph, factor, numbered(size)).parameter
    except Blocked:
        return None
    if constant:
        steps[0] = Step(product.name, product.op, steps[0].rule, "moved by a constant of its channel", True)
        taken = graph.users[product.name][0]
        steps.insert(0, Step(taken.name, taken.op, "the shift takes the constant over", "unchanged", None))
    into = (view.parameter, *biases, *([shift] if shift else []))
    return ScaleClaim(
        code=code,
        name=name,
        node=own,
        dof=size,
        verdict="folds",
        into=into,
        steps=tuple(reversed(steps)),
        weight=view.parameter,
        output=view.output,
        biases=tuple(biases),
        factor=factor,
        product=product.name,
        channel=channel,
        shift=shift,
    )


CONSTANT = "a constant per channel is added: the scale leaves a constant behind"
SCALED = "a constant factor passes the scale on"
BIAS = "the bias of the channel is scaled too"


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


def step_back(graph: Graph, node: Node, channel: int) -> tuple[str, str] | None:
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
        return (other.name, BIAS) if node.op == "aten.add" and own else None
    return other.name, CONSTANT if node.op in ("aten.add", "aten.sub") else SCALED


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
