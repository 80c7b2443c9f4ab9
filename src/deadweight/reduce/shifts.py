"""Rewrites of the shift laws: drop what is dead, fold what moves, centre what a LayerNorm ignores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Graph
from deadweight.laws.point import Point
from deadweight.laws.shift_claim import ShiftClaim, undo
from deadweight.proof.absorb import Absorber
from deadweight.proof.opsets import SHAPE
from deadweight.proof.reading import CentredReader, centred_reader
from deadweight.proof.weights import weight_view
from deadweight.reduce.effect import Constants, effect
from deadweight.reduce.known import Known
from deadweight.reduce.rewrite import NotDone, Rewrite, Tensors, as_index, chosen_place
from deadweight.save.facts import Because, Constant, Fact, ZeroPlaces, module_of

KEEPS = SHAPE | {"aten.add", "aten.sub", "aten.dropout"}


@dataclass(frozen=True, kw_only=True)
class ShiftRewrite(Rewrite):
    claim: ShiftClaim

    @property
    def nodes(self) -> tuple[str, ...]:
        on_the_way = {
            n
            for s in self.claim.steps
            if s.node in self.graph.nodes
            for n in parameters_read(self.graph, s.node, {t.node for t in self.claim.steps})
        }
        return tuple(dict.fromkeys((self.claim.node, *self.claim.into, *sorted(on_the_way))))

    @property
    def saves(self) -> int:
        return self.claim.dof

    def moving(self) -> Tensor:
        return (self.claim.groups != 0).expand(self.graph.nodes[self.claim.node].shape)

    def removed(self, name: str, because: Because) -> Fact:
        """What is zero now: the whole vector, or these places of it."""
        moving = self.moving()
        if bool(moving.all()):
            return Constant(name, 0.0, because)
        axis = self.claim.axis
        places = moving.movedim(axis, 0).reshape(moving.shape[axis], -1).all(1).nonzero().reshape(-1)
        return ZeroPlaces(name, axis, as_index(places), because=because)

    def absorb(self, tensors: Tensors, amounts: Mapping[str, Tensor], known: Known) -> None:
        """Undo these shifts in the parameters that take them over."""
        gone = [self.name(a.parameter) for a in self.claim.absorbers if a.node in amounts]
        if again := [n for n in gone if known.is_folded(n)]:
            raise NotDone(f"{again[0]} is already gone, and would be needed again")
        for absorber in self.claim.absorbers:
            if absorber.node in amounts and not absorber.again:
                name = self.name(absorber.parameter)
                moved = tensors[name] + undo(Point(self.graph, {}, {}), absorber, amounts[absorber.node])
                tensors[name] = torch.where(known.dead(name, moved.shape), 0.0, moved)

    def lookup(self, tensors: Tensors) -> Constants:
        return Constants(self.graph, lambda node: self.value(tensors, node))


def parameters_read(graph: Graph, node: str, steps: set[str]) -> set[str]:
    """Parameters and stored buffers (behind views, not behind data) that a step computes with."""
    found, stack = set[str](), [n for n in graph.nodes[node].inputs if n not in steps]
    while stack:
        current = graph.nodes[stack.pop()]
        if current.name in graph.parameters or current.name in graph.buffers:
            found.add(current.name)
        elif not graph.depends[current.name][1]:
            stack.extend(current.inputs)
    return found


@dataclass(frozen=True, kw_only=True)
class Drop(ShiftRewrite):
    """What is dead, element by element, becomes zero."""

    @property
    def whole(self) -> bool:
        return bool(self.moving().all())

    @property
    def saves(self) -> int:
        return int(self.moving().sum())

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.claim.node,)

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        tensors[self.target] = torch.where(self.moving(), 0.0, tensors[self.target])
        return [self.removed(self.target, "dead")]


@dataclass(frozen=True, kw_only=True)
class Fold(ShiftRewrite):
    """A vector's whole effect moves into what takes it over, and it becomes zero."""

    @property
    def whole(self) -> bool:
        return bool(self.moving().all())

    @property
    def saves(self) -> int:
        return int(self.moving().sum())

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        shift = torch.where(self.moving(), -tensors[self.target], 0.0)
        parameter = lambda node: self.value(tensors, node)  # noqa: E731
        amounts = effect(self.graph, self.claim, self.claim.node, shift, parameter)
        self.absorb(tensors, amounts, known)
        tensors[self.target] = torch.where(self.moving(), 0.0, tensors[self.target])
        return [self.removed(self.target, "folded")]


@dataclass(frozen=True, kw_only=True)
class FoldBack(Fold):
    """The other way round: a bias that only meets the norm's shift moves into that shift, and becomes zero."""

    taken: Absorber

    @property
    def target(self) -> str:
        return self.name(self.taken.parameter)

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        source = self.name(self.claim.node)
        shift = tensors[self.target].reshape(tensors[source].shape)
        parameter = lambda node: self.value(tensors, node)  # noqa: E731
        amounts = effect(self.graph, self.claim, self.claim.node, shift, parameter)
        self.absorb(tensors, amounts, known)
        tensors[source] = tensors[source] + shift
        left = float(tensors[self.target].abs().max())
        assert left <= 1e-12 * float(shift.abs().max() + 1), left
        tensors[self.target] = torch.zeros_like(tensors[self.target])
        return [Constant(self.target, 0.0, "folded")]


def direct_absorber(graph: Graph, claim: ShiftClaim) -> Absorber | None:
    """The one bias that meets the shift itself, on the residual path, in the same order of channels."""
    found = [a for a in claim.absorbers if a.kind == "bias" and is_direct(graph, claim.node, a)]
    if len(found) != 1 or not bool((claim.groups != 0).all()):
        return None
    width = torch.Size(graph.nodes[claim.node].shape).numel()
    index = found[0].index.reshape(-1, width) if found[0].index.numel() % width == 0 else None
    in_order = index is not None and torch.equal(index, torch.arange(width).expand_as(index))
    return found[0] if in_order and graph.nodes[found[0].parameter].shape == (width,) else None


def is_direct(graph: Graph, source: str, absorber: Absorber) -> bool:
    """Whether nothing but sums and moves stands between."""
    reached, stack = set[str](), [source]
    while stack:
        for node in graph.users[stack.pop()]:
            if node.name not in reached:
                reached.add(node.name)
                stack.append(node.name)
    back, stack = set[str](), [absorber.node]
    while stack:
        name = stack.pop()
        if name in reached and name not in back:
            back.add(name)
            stack.extend(graph.nodes[name].inputs)
    return absorber.node in back and all(graph.nodes[n].op in KEEPS for n in back)


@dataclass(frozen=True, kw_only=True)
class Centre(ShiftRewrite):
    """Subtract one channel from all: nobody sees what is common to all channels, and that channel becomes zero."""

    @property
    def axis(self) -> int:
        """The axis along which the elements of one group lie."""
        groups = self.claim.groups.expand(self.graph.nodes[self.claim.node].shape)
        for axis in range(groups.ndim):
            if torch.equal(groups, groups.narrow(axis, 0, 1).expand_as(groups)) and groups.shape[axis] > 1:
                return axis
        raise NotDone("the elements that move together do not lie along one axis")

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.claim.node, *([self.claim.profile] if self.claim.profile in self.graph.parameters else []))

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        if known.is_folded(self.target):
            raise NotDone("it is already gone")
        if not bool(self.moving().all()):
            raise NotDone("only some rows of it are read, and only of these the mean is dead")
        if self.claim.profile is not None:
            profile = self.lookup(tensors).of(self.claim.profile)
            if not bool((profile == 1).all()):
                raise NotDone("a factor per channel stands behind it that does not fold")
        weight, axis = tensors[self.target], self.axis
        taken = known.centred_channel(module_of(self.target))
        place = chosen_place(weight, axis) if taken is None else taken
        weight = weight - weight.narrow(axis, place, 1)
        tensors[self.target] = weight
        return [ZeroPlaces(self.target, axis, (place,), because="centred")]


@dataclass(frozen=True, kw_only=True)
class LoseDirection(ShiftRewrite):
    """W += u(1/γ)ᵀ with the u that empties one column; the constant that this adds goes to the bias."""

    @property
    def nodes(self) -> tuple[str, ...]:
        reader = self.reader
        affine = [n for n in (reader.gain, reader.shift) if n is not None]
        read = [p for n in affine for p in parameters_read(self.graph, n, set())]
        read += [n for n in affine if n in self.graph.parameters]
        return tuple(dict.fromkeys((*super().nodes, *read)))

    @property
    def reader(self) -> CentredReader:
        assert self.claim.lost is not None
        reader = centred_reader(self.graph, self.graph.nodes[self.claim.lost])
        assert reader is not None
        return reader

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        values, reader, lost = self.lookup(tensors), self.reader, self.claim.lost
        assert lost is not None
        view = weight_view(self.graph, self.graph.nodes[lost])
        assert view is not None
        weight = tensors[self.target]
        rows = weight if view.output == 0 else weight.T
        gain = torch.ones(rows.shape[1], dtype=torch.float64)
        gain = values.of(reader.gain).reshape(-1) if reader.gain else gain
        if float(gain.abs().min()) < 1e-3 * float(gain.abs().max()):
            raise NotDone("the gain of the norm is too close to zero in some channel")
        moving = (self.claim.groups != 0).reshape(-1)
        taken = known.lost_columns(self.target)
        column = taken[0] if taken else chosen_place(rows, 1)
        u = torch.where(moving, -rows[:, column] * gain[column], 0.0)
        if reader.shift is not None:
            constant = u * (values.of(reader.shift).reshape(-1) / gain).sum()
            if bool((constant != 0).any()):
                shape = self.graph.nodes[lost].shape
                parameter = lambda node: self.value(tensors, node)  # noqa: E731
                amounts = effect(self.graph, self.claim, lost, constant.expand(shape), parameter)
                if self.claim.absorbers and not amounts:
                    raise NotDone("the constant that it adds has nowhere to go")
                self.absorb(tensors, amounts, known)
        rows = rows + torch.outer(u, 1 / gain)
        rows[moving, column] = 0.0
        tensors[self.target] = rows if view.output == 0 else rows.T.contiguous()
        others = None if bool(moving.all()) else as_index(moving.nonzero().reshape(-1))
        return [ZeroPlaces(self.target, view.input, (column,), others, because="lost")]


def folds_into_weights(claim: ShiftClaim) -> bool:
    """Whether some absorber is a weight or a table instead of a bias."""
    return any(a.kind != "bias" for a in claim.absorbers)
