"""Claims proved by following a shift, and the motions of parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph, Node
from deadweight.laws.claim import Claim, Motion
from deadweight.proof.absorb import Absorber
from deadweight.proof.reading import CentredReader, centred_reader
from deadweight.proof.weights import weight_view


@dataclass(frozen=True, kw_only=True)
class ShiftClaim(Claim):
    """Each group of elements moves together; absorbers move by whatever undoes it downstream.

    `groups` numbers the elements of the source that move together (0: not at all). `profile` names a node whose
    inverse weighs the motion along the output axis (LayerScale). A `lost` source is a weight that moves along 1/γ.
    """

    groups: Tensor
    absorbers: tuple[Absorber, ...] = ()
    lost: str | None = None  # the linear node, when the source is the direction that LayerNorm removed
    profile: str | None = None

    def motions(self, graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Iterator[Motion]:
        for group in self.groups.unique().tolist():
            if group:
                yield self.complete(graph, values, inputs, self.source_motion(graph, values, inputs, group))

    def source_motion(
        self, graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], group: int
    ) -> Motion:
        if self.lost is not None:
            amounts = torch.zeros(graph.nodes[self.lost].shape[-1], dtype=torch.float64)
            amounts[group - 1] = 1.0
            return {self.node: lost_motion(graph, graph.nodes[self.lost], values, inputs, amounts, unit=False)}
        motion = (self.groups == group).to(torch.float64).expand(graph.nodes[self.node].shape)
        if self.profile is not None:
            scale = node_value(graph, values, inputs, self.profile).reshape(-1)
            shape = [-1 if n == len(scale) and i == self.output_axis(graph) else 1 for i, n in enumerate(motion.shape)]
            motion = motion / scale.reshape(shape)
        return {self.node: motion.clone()}

    def output_axis(self, graph: Graph) -> int:
        """Which axis of the weight is its output's: the last for a transposed weight, else the first."""
        users = graph.users[self.node]
        return graph.nodes[self.node].shape.__len__() - 1 if users and users[0].op == "aten.t" else 0

    def complete(
        self, graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], motion: Motion
    ) -> Motion:
        """Add what each absorber must do, measured in forward mode at the place where it takes the shift over."""
        if not self.absorbers:
            return motion
        by_node = {a.node: a for a in self.absorbers}
        found: Motion = dict(motion)
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(values[name], motion[name]) if name in motion else value
                for name, value in values.items()
            }

            def watch(node: Node, value: Any) -> Any:
                if node.name not in by_node:
                    return value
                primal, tangent = forward_ad.unpack_dual(value)
                if tangent is not None:
                    moved = undo(graph, by_node[node.name], tangent, values, inputs)
                    name = by_node[node.name].parameter
                    found[name] = found[name] + moved if name in found else moved
                return primal

            evaluate(graph, duals, inputs, watch)
        return found


def undo(
    graph: Graph, absorber: Absorber, tangent: Tensor, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Tensor:
    """The motion of the absorbing parameter that cancels this tangent."""
    shape = graph.nodes[absorber.parameter].shape
    index = absorber.index.expand(tangent.shape).reshape(-1)
    size = shape[-1] if absorber.kind == "table" else int(index.max()) + 1
    size = torch.Size(shape).numel() if absorber.kind == "bias" else size
    amounts = torch.zeros(size, dtype=torch.float64)
    amounts[index] = tangent.reshape(-1)
    if absorber.kind == "table":
        return -amounts.expand(shape).clone()
    if absorber.kind == "lost":
        node = linear_of(graph, absorber.parameter)
        return -lost_motion(graph, node, values, inputs, amounts, unit=True)
    return -amounts.reshape(shape)


def linear_of(graph: Graph, parameter: str) -> Node:
    node = graph.users[parameter][0]
    while node.op != "linear":
        node = graph.users[node.name][0]
    return node


def lost_motion(
    graph: Graph,
    node: Node,
    values: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    amounts: Tensor,
    *,
    unit: bool,
) -> Tensor:
    """u(1/γ)ᵀ, scaled for `unit` so that the output moves by exactly `amounts`."""
    reader = centred_reader(graph, node)
    assert reader is not None
    gain, shift = affine_values(graph, values, inputs, reader)
    row = 1 / gain
    scale = (shift / gain).sum() if unit else 1.0
    motion = torch.outer(amounts / scale, row)
    view = weight_view(graph, node)
    return motion if view is None or view.output == 0 else motion.T


def affine_values(
    graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], reader: CentredReader
) -> tuple[Tensor, Tensor]:
    width = graph.nodes[reader.core].shape[-1]
    gain = torch.ones(width, dtype=torch.float64)
    shift = torch.zeros(width, dtype=torch.float64)
    if reader.gain is not None:
        gain = node_value(graph, values, inputs, reader.gain).reshape(-1)
    if reader.shift is not None:
        shift = node_value(graph, values, inputs, reader.shift).reshape(-1)
    return gain, shift


def node_value(graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """The value of one node that depends on parameters alone."""
    if name in values:
        return values[name].to(torch.float64)
    found: dict[str, Tensor] = {}

    def watch(node: Node, value: Any) -> Any:
        if node.name == name:
            found[name] = value
        return value

    evaluate(graph, values, inputs, watch)
    return found[name]
