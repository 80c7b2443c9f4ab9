"""A trace leaves nothing in the caches of the model's own functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.graph.trace import trace


def hidden(remembering: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    @functools.wraps(remembering)
    def call(n: int) -> Tensor:
        return remembering(n)

    return call


@functools.lru_cache
def plain(n: int) -> Tensor:
    return torch.arange(float(n))


@hidden
@functools.lru_cache
def decorated(n: int) -> Tensor:
    return torch.arange(float(n)) + 1


class Positions(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    @staticmethod
    @functools.cache
    def static(n: int) -> Tensor:
        return torch.arange(float(n)) * 2

    def forward(self, x: Tensor) -> Tensor:
        table = {"plain": plain, "decorated": decorated, "static": self.static}[self.way]
        return self.linear(x) + table(x.shape[-1])


@pytest.mark.parametrize("way", ["plain", "decorated", "static"])
def test_a_model_that_remembers_results_runs_after_a_trace(way: str) -> None:
    """BEiT, DINOv3 and others remember positions: they answered with the trace's fake tensors from then on."""
    module, x = Positions(way), torch.randn(2, 4)
    trace(module, (x,))
    y = module(x)
    assert type(y) is Tensor and y.dtype == torch.float32
    deadweight.audit(module, (x,))
    assert torch.equal(module(x), y)


@functools.lru_cache
def shared() -> nn.Linear:
    return nn.Linear(4, 4)


class Singleton(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = shared()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(shared()(x))


def test_what_was_remembered_before_stays() -> None:
    module = Singleton()
    trace(module, (torch.randn(2, 4),))
    assert shared() is module.linear
