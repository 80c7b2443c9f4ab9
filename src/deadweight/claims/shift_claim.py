"""Claims proved by following a shift, and the motions of parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.graph.node import Graph, Node
from deadweight.proof.absorb import Absorber
from deadweight.proof.labels import compact
from deadweight.proof.readers import centred_input
from deadweight.proof.weights import weight_view

FAR = 3.0  # parameters are of order one


@dataclass(frozen=True, kw_only=True)
class ShiftClaim(Claim):
    """Each group of elements moves together; absorbers move by whatever undoes it downstream.

    `groups` numbers the elements of the source that move together (0: not at all). `profile` names a node whose
    inverse weighs the motion along the output axis (LayerScale). A `lost` source is a weight that moves along 1/γ.
    `partners` are vectors that move as the source does.
    """

    groups: Tensor
    absorbers: tuple[Absorber, ...] = ()
    lost: str | None = None  # the linear node, when the source is the direction that LayerNorm removed
    profile: str | None = None
    partners: tuple[str, ...] = ()
    unread: bool = False  # nothing reads these elements

    def motions(self, point: Point) -> Iterator[Motion]:
        for group in self.numbers():
            yield self.complete(point, self.source_motion(point, {group: 1.0}))

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        groups = self.numbers()
        amounts = dict(zip(groups, normal(generator, len(groups)).tolist(), strict=True))
        return self.complete(point, self.source_motion(point, amounts))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """Shifts are linear in their source: a long way along a direction is as good as a short one.

        Only a weight that takes over along the direction that LayerNorm lost does so times Σ(β/γ), which β changes.
        """
        motion = {n: FAR * t for n, t in self.direction(point, generator).items()}
        ahead = point.at({n: point.values[n] + t for n, t in motion.items()})
        for absorber in self.absorbers:
            if absorber.kind == "lost":
                node = linear_of(point.graph, absorber.parameter)
                motion[absorber.parameter] *= lost_scale(point, node) / lost_scale(ahead, node)
        return {n: point.values[n] + t for n, t in motion.items()}

    def numbers(self) -> list[int]:
        return [group for group in compact(self.groups).unique().tolist() if group]

    def source_motion(self, point: Point, amounts: Mapping[int, float]) -> Motion:
        """The source moves, each group by its own amount."""
        by_group = torch.zeros(max(amounts, default=0) + 1, dtype=torch.float64)
        by_group[list(amounts)] = torch.tensor(list(amounts.values()), dtype=torch.float64)
        graph = point.graph
        if self.lost is not None:
            rows = by_group[torch.where(self.groups < len(by_group), self.groups, 0).reshape(-1)]
            return {self.node: lost_motion(point, graph.nodes[self.lost], rows, unit=False)}
        moving = torch.where(self.groups < len(by_group), self.groups, 0)
        motion = by_group[compact(moving)].expand(graph.nodes[self.node].shape)
        if self.profile is not None:
            scale = point.value(self.profile).reshape(-1)
            shape = [-1 if n == len(scale) and i == self.output_axis(graph) else 1 for i, n in enumerate(motion.shape)]
            motion = motion / scale.reshape(shape)
        alike = {name: motion.reshape(graph.nodes[name].shape).clone() for name in self.partners}
        return {self.node: motion.clone(), **alike}

    def output_axis(self, graph: Graph) -> int:
        return channel_axis(graph, graph.nodes[self.node])

    def complete(self, point: Point, motion: Motion) -> Motion:
        """Add what each absorber must do, measured in forward mode at the place where it takes the shift over."""
        if not self.absorbers:
            return motion
        by_node = {a.node: a for a in self.absorbers}
        result: Motion = dict(motion)

        def take(node: Node, tangent: Tensor) -> bool:
            if node.name in by_node and not by_node[node.name].again:
                moved = undo(point, by_node[node.name], tangent)
                name = by_node[node.name].parameter
                result[name] = result[name] + moved if name in result else moved
            return node.name in by_node

        point.tangents(motion, (step.node for step in self.steps), take)
        return result


def element_wise(claim: ShiftClaim) -> bool:
    """Whether every element that moves does so by itself."""
    groups = compact(claim.groups)
    present = int(groups.count_nonzero())
    if groups.numel() < claim.groups.numel() and present:
        return False  # what is repeated moves together
    return int(groups.unique().count_nonzero()) == present


def channel_axis(graph: Graph, node: Node) -> int:
    """The axis along which a parameter writes the channels of its output: the first of a weight, else the last.

    A transposed weight, and what is added to a value, has its channels last.
    """
    return 0 if any(user.op == "linear" for user in graph.users[node.name]) else len(node.shape) - 1


def undo(point: Point, absorber: Absorber, tangent: Tensor) -> Tensor:
    """The motion of the absorbing parameter that cancels this tangent."""
    graph = point.graph
    shape = graph.nodes[absorber.parameter].shape
    index = absorber.index.expand(tangent.shape).reshape(-1)
    size = shape[-1] if absorber.kind == "table" else int(index.max()) + 1
    size = torch.Size(shape).numel() if absorber.kind == "bias" else size
    amounts = torch.zeros(size, dtype=torch.float64)
    amounts[index] = tangent.reshape(-1)
    if absorber.kind == "table":
        return -amounts.expand(shape).clone()
    if absorber.kind == "lost":
        return -lost_motion(point, linear_of(graph, absorber.parameter), amounts, unit=True)
    return -amounts.reshape(shape)


def linear_of(graph: Graph, parameter: str) -> Node:
    node = graph.users[parameter][0]
    while node.op != "linear":
        node = graph.users[node.name][0]
    return node


def lost_motion(point: Point, node: Node, amounts: Tensor, *, unit: bool) -> Tensor:
    """u(1/γ)ᵀ, scaled for `unit` so that the output moves by exactly `amounts`."""
    gain, _ = affine_values(point, node)
    motion = torch.outer(amounts / (lost_scale(point, node) if unit else 1.0), 1 / gain)
    view = weight_view(point.graph, node)
    assert view is not None
    if view.expert is not None:  # the rows of all experts, one expert after the other
        motion = motion.unflatten(0, (point.graph.nodes[view.parameter].shape[view.expert], -1))
    return motion if view.output < view.input else motion.mT


def lost_scale(point: Point, node: Node) -> Tensor:
    """Σ(β/γ): what the direction 1/γ adds to a reader's output."""
    gain, shift = affine_values(point, node)
    return (shift / gain).sum()


def affine_values(point: Point, node: Node) -> tuple[Tensor, Tensor]:
    """γ and β of the norm that a linear map reads."""
    reader = centred_input(point.graph, node)
    assert reader is not None
    width = point.graph.nodes[reader.core].shape[-1]
    gain = torch.ones(width, dtype=torch.float64)
    shift = torch.zeros(width, dtype=torch.float64)
    if reader.gain is not None:
        gain = point.value(reader.gain).reshape(-1)
    if reader.shift is not None:
        shift = point.value(reader.shift).reshape(-1)
    return gain, shift
