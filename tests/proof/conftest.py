"""Small functions as traced graphs, and whether they stay as they are along a claimed motion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.claim import Claim
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace

STEP = 1e-5
FLAT = 1e-6  # second order in the step, for derivatives of order one: (1e-5)² with room to spare

torch.set_num_threads(1)  # the graphs are tiny: more threads only wait for each other


class Lambda(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            plain = isinstance(part, Tensor) and not isinstance(part, (nn.Buffer, nn.Parameter))
            setattr(self, name, nn.Parameter(part) if plain else part)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, *inputs)


@pytest.fixture
def traced() -> Callable[..., Graph]:
    """The canonical graph of a function of a module's parts and its inputs."""

    def build(forward: Callable, inputs: tuple[Tensor, ...], *, training: bool = False, **parts: object) -> Graph:
        torch.manual_seed(0)
        module = Lambda(forward, **parts).double().train(training)  # type: ignore[arg-type]
        return canonical(trace(module, inputs))

    return build


@pytest.fixture
def assert_flat() -> Callable[[Graph, Claim, tuple[Tensor, ...]], None]:
    """A small step along each motion of a claim changes the outputs by less than second order."""

    def check(graph: Graph, claim: Claim, inputs: tuple[Tensor, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        values = {
            n: torch.rand(t.shape, generator=generator, dtype=torch.float64) + 0.3 if t.is_floating_point() else t
            for n, t in graph.tensors.items()
        }
        bound = dict(zip(graph.inputs, inputs, strict=True))
        for motion in claim.motions(Point(graph, values, bound)):
            up, down = (run(graph, shifted(values, motion, sign * STEP), bound) for sign in (1, -1))
            slope = max(float((a - b).abs().max()) for a, b in zip(up, down, strict=True)) / (2 * STEP)
            assert slope < FLAT, (claim.code, claim.node, slope)

    return check


def shifted(values: dict[str, Tensor], motion: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    return {n: v + step * motion[n] if n in motion else v for n, v in values.items()}


def run(graph: Graph, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(5)  # dropout draws the same mask each time
    return evaluate(graph, values, inputs)
