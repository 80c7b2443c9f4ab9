"""The rewrite of a factor per channel after a linear map: LayerScale, and BatchNorm in eval mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.scale_claim import ScaleClaim
from deadweight.graph.node import float64_arguments, substitute
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import Rewrite, Tensors
from deadweight.rewrite.shift_effect import StaticValues
from deadweight.rewrite.shifts import parameters_read
from deadweight.save.facts import Constant, Fact, Passed, module_of


@dataclass(frozen=True, kw_only=True)
class FoldScale(Rewrite):
    """The rows of the previous layer absorb the factor per channel, and the running statistics of BatchNorm."""

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
        return True  # the norm's shift becomes the bias of the previous layer

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        claim = self.claim
        zero, one = self.through(tensors, 0.0), self.through(tensors, 1.0)
        values = StaticValues(self.graph, lambda node: self.value(tensors, node))
        gain = values.of(claim.factor).reshape(-1)
        slope, offset = one - zero, zero  # of the factor's operand, as a function of the linear map's output
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
        """Set a running statistic to the value with which it has no effect."""
        tensors[self.name(buffer)] = torch.full_like(self.value(tensors, buffer), value)

    def is_variance(self, buffer: str) -> bool:
        return any(u.op == "running_scale" for u in self.graph.users[buffer])

    def reads(self, node: str) -> bool:
        chain = {s.node for s in self.claim.steps}
        return any(u.name in chain for u in self.graph.users[node])

    def through(self, tensors: Tensors, level: float) -> Tensor:
        """Per channel, the factor's operand if the linear map returns `level` and its biases are zero."""
        claim = self.claim
        chain = [s.node for s in claim.steps]
        values: dict[str, Tensor] = {}

        def parameter(node: str) -> Tensor:
            return torch.zeros_like(self.value(tensors, node)) if node in claim.biases else self.value(tensors, node)

        known = StaticValues(self.graph, parameter)
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
