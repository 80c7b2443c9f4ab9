"""Small functions as traced graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace

torch.set_num_threads(1)  # the graphs are tiny: more threads only wait for each other


class Lambda(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            plain = isinstance(part, Tensor) and not isinstance(part, nn.Buffer)
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
