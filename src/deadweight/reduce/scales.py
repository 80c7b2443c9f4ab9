"""Rewrites of factors per channel: a norm's gain, LayerScale, and BatchNorm in eval."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.evaluate import float64_arguments
from deadweight.graph.node import substitute
from deadweight.laws.scale_claim import ScaleClaim
from deadweight.laws.turn_claim import TurnClaim
from deadweight.proof.turn import Site
from deadweight.reduce.effect import Constants
from deadweight.reduce.known import Known
from deadweight.reduce.rewrite import NotDone, Rewrite, Tensors
from deadweight.reduce.shifts import parameters_read
from deadweight.save.facts import Constant, Fact, Passed, module_of


@dataclass(frozen=True, kw_only=True)
class FoldGain(Rewrite):
    """The readers' columns take the gain of a norm, which becomes one."""

    claim: TurnClaim

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.parameter for s in self.claim.sites))

    @property
    def saves(self) -> int:
        return self.claim.dof

    @property
    def whole(self) -> bool:
        return True

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        own = next(s for s in self.claim.sites if s.role == "gain")
        assert own.value is not None
        values = Constants(self.graph, lambda node: self.value(tensors, node))
        gain = values.of(own.value).reshape(-1)
        factor = torch.ones(len(self.claim.blocks), dtype=torch.float64)
        factor[own.coordinate] = gain
        for site in self.claim.sites:
            kept = site.role == "out" and bool((self.value(tensors, site.parameter) != 0).any())
            if kept and float(gain.abs().min()) < 1e-3 * float(gain.abs().max()):
                raise NotDone("the norm keeps a shift, and its gain is too close to zero in some channel")
        for site in self.claim.sites:
            name = self.name(site.parameter)
            if site.role in ("in", "out"):
                tensors.scale(name, site.axis, per_index(site, factor if site.role == "in" else 1 / factor))
        rest = tensors[self.target] + (1 - gain).reshape(tensors[self.target].shape)
        settled = float(rest.reshape(-1)[0].round())
        if float((rest - settled).abs().max()) > 1e-12:
            raise NotDone("its parameter is not the gain itself, and does not become a constant")
        tensors[self.target] = torch.full_like(rest, settled)
        return [Constant(self.target, settled)]


def per_index(site: Site, factor: Tensor) -> Tensor:
    """Each index of the site's axis with its coordinate's factor."""
    found = torch.where(site.coordinate == 0, 1.0, factor[site.coordinate])
    return torch.where(torch.isfinite(found), found, 1.0)


@dataclass(frozen=True, kw_only=True)
class FoldScale(Rewrite):
    """The rows of the layer before take a factor per channel, and with it what BatchNorm has stored."""

    claim: ScaleClaim

    @property
    def nodes(self) -> tuple[str, ...]:
        chain = {s.node for s in self.claim.steps}
        stored = {b for s in chain for b in parameters_read(self.graph, s, chain) if b in self.graph.buffers}
        return (self.claim.node, *self.claim.into, *sorted(stored))

    @property
    def saves(self) -> int:
        return self.claim.dof

    @property
    def whole(self) -> bool:
        return True

    @property
    def stored_together(self) -> bool:
        return True  # the norm's shift becomes the bias of the layer before it

    def apply(self, tensors: Tensors, known: Known) -> list[Fact]:
        claim = self.claim
        zero, one = self.through(tensors, 0.0), self.through(tensors, 1.0)
        values = Constants(self.graph, lambda node: self.value(tensors, node))
        gain = values.of(claim.factor).reshape(-1)
        slope, offset = one - zero, zero  # of what the factor multiplies
        weight = self.name(claim.weight)
        rows = tensors[weight]
        scale = gain * slope
        tensors[weight] = rows * scale.reshape([-1 if a == claim.output else 1 for a in range(rows.ndim)])
        for bias in claim.biases:
            tensors[self.name(bias)] = tensors[self.name(bias)] * scale
        rest = tensors[self.target] + (1 - gain).reshape(tensors[self.target].shape)
        tensors[self.target] = rest
        facts: list[Fact] = [Constant(self.target, 1.0)] if bool((rest == 1).all()) else []
        if claim.shift is None:
            return facts
        shift = self.name(claim.shift)
        tensors[shift] = tensors[shift] + (gain * offset).reshape(tensors[shift].shape)
        for node in self.graph.nodes.values():
            if node.op == "running_scale" and self.reads(node.name):
                self.forget(tensors, node.args[0].name, 1.0 - float(node.args[1]))
            elif node.name in self.graph.buffers and node.name in self.nodes and not self.is_variance(node.name):
                self.forget(tensors, node.name, 0.0)
        return [*facts, Passed(module_of(self.target), module_of(weight))]

    def forget(self, tensors: Tensors, buffer: str, value: float) -> None:
        """Replace a stored statistic by what makes it do nothing."""
        tensors[self.name(buffer)] = torch.full_like(self.value(tensors, buffer), value)

    def is_variance(self, buffer: str) -> bool:
        return any(u.op == "running_scale" for u in self.graph.users[buffer])

    def reads(self, node: str) -> bool:
        chain = {s.node for s in self.claim.steps}
        return any(u.name in chain for u in self.graph.users[node])

    def through(self, tensors: Tensors, level: float) -> Tensor:
        """Per channel, what the factor multiplies when the linear map gives this level (and its biases nothing)."""
        claim = self.claim
        chain = [s.node for s in claim.steps]
        values: dict[str, Tensor] = {}

        def parameter(node: str) -> Tensor:
            return torch.zeros_like(self.value(tensors, node)) if node in claim.biases else self.value(tensors, node)

        known = Constants(self.graph, parameter)
        for name in chain:
            node = self.graph.nodes[name]
            if not values:
                values[name] = torch.full(node.shape, level, dtype=torch.float64)
                continue
            if name == claim.product:
                break
            assert node.target is not None
            args = substitute(node.args, lambda n: values[n] if n in values else known.of(n))
            values[name] = node.target(*float64_arguments(args), **node.kwargs)
        last = list(values.values())[-1].movedim(claim.channel, 0)
        return last.reshape(last.shape[0], -1)[:, 0]
