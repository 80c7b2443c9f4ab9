"""Rewrites of shifts: set what is dead to zero, fold the rest into other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.point import Point
from deadweight.claims.shift_claim import ShiftClaim, element_wise, undo
from deadweight.graph.node import Graph, is_vector
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors, as_index
from deadweight.rewrite.shift_effect import StaticValues, effect
from deadweight.save.facts import Because, Constant, Fact, ZeroPlaces


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
        """The fact that the whole vector, or some indices of it, are zero now."""
        moving = self.moving()
        if bool(moving.all()):
            return Constant(name, 0.0, because)
        axis = self.claim.axis
        places = moving.movedim(axis, 0).reshape(moving.shape[axis], -1).all(1).nonzero().reshape(-1)
        return ZeroPlaces(name, axis, as_index(places), because=because)

    def absorb(self, tensors: Tensors, amounts: Mapping[str, Tensor], known: SettledFacts) -> None:
        """Add these shifts to the parameters that absorb them."""
        gone = [self.name(a.parameter) for a in self.claim.absorbers if a.node in amounts]
        if again := [n for n in gone if known.is_folded(n)]:
            raise NotDone(f"an earlier rewrite has removed {again[0]}, into which it would fold")
        for absorber in self.claim.absorbers:
            if absorber.node in amounts and not absorber.again:
                name = self.name(absorber.parameter)
                moved = tensors[name] + undo(Point(self.graph, {}, {}), absorber, amounts[absorber.node])
                tensors[name] = torch.where(known.dead(name, moved.shape), 0.0, moved)

    def lookup(self, tensors: Tensors) -> StaticValues:
        return StaticValues(self.graph, lambda node: self.value(tensors, node))


def parameters_read(graph: Graph, node: str, steps: set[str]) -> set[str]:
    """Parameters and stored buffers that a step reads, directly or through values that depend on no input."""
    result, stack = set[str](), [n for n in graph.nodes[node].inputs if n not in steps]
    while stack:
        current = graph.nodes[stack.pop()]
        if current.name in graph.parameters or current.name in graph.buffers:
            result.add(current.name)
        elif not graph.depends[current.name][1]:
            stack.extend(current.inputs)
    return result


@dataclass(frozen=True, kw_only=True)
class ZeroingRewrite(ShiftRewrite):
    """Every element that moves becomes zero, and need not be stored."""

    @property
    def whole(self) -> bool:
        return bool(self.moving().all())

    @property
    def saves(self) -> int:
        return int(self.moving().sum())


@dataclass(frozen=True, kw_only=True)
class Drop(ZeroingRewrite):
    """Dead elements become zero."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.claim.node,)

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        tensors[self.target] = torch.where(self.moving(), 0.0, tensors[self.target])
        return [self.removed(self.target, "dead")]


@dataclass(frozen=True, kw_only=True)
class Fold(ZeroingRewrite):
    """The effect of a vector moves into its absorbers, and the vector becomes zero."""

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        shift = torch.where(self.moving(), -tensors[self.target], 0.0)
        parameter = lambda node: self.value(tensors, node)  # noqa: E731
        amounts = effect(self.graph, self.claim, self.claim.node, shift, parameter)
        self.absorb(tensors, amounts, known)
        tensors[self.target] = torch.where(self.moving(), 0.0, tensors[self.target])
        return [self.removed(self.target, "folded")]


def folds_into_weights(claim: ShiftClaim) -> bool:
    """Whether some absorber is a weight or a table, not a bias."""
    return any(a.kind != "bias" for a in claim.absorbers)


def rewrite_shift(graph: Graph, claim: Claim) -> Rewrite:
    """Drop dead elements, or fold elements into biases; only whole elements of a vector."""
    assert isinstance(claim, ShiftClaim)
    if claim.verdict == "dead":
        if element_wise(claim) and is_vector(graph.nodes[claim.node]):
            return Drop(graph=graph, claim=claim)
        raise NotDone("only an average of it is dead: no single element can be removed")
    if folds_into_weights(claim):
        raise NotDone("there is no bias to fold it into, only a table or weight")
    if not element_wise(claim):
        raise NotDone("only an average of it folds: no single element can be removed")
    return Fold(graph=graph, claim=claim)
