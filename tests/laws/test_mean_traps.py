"""The mean before a LayerNorm behind a factor per channel: it is dead along 1/λ, if every channel has its own element.

Each trap lacks one condition; every claim is moved along, and must leave the outputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Normed(nn.Module):
    """What may stand before a factor per channel and a LayerNorm."""

    def __init__(self, forward: Callable) -> None:
        super().__init__()
        self.function = forward
        self.write, self.wide = nn.Linear(4, 6, bias=False), nn.Linear(4, 12, bias=False)
        self.square, self.queries = nn.Linear(6, 6, bias=False), nn.Parameter(torch.randn(6, 6))
        self.turned = nn.Parameter(torch.randn(4, 6))
        self.scale, self.bias = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.rand(6))
        self.one, self.number = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(()))
        self.flat = nn.Parameter(torch.rand(1, 1, 6))
        self.places, self.column = nn.Parameter(torch.rand(3, 6)), nn.Parameter(torch.rand(6, 1))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


HOLDS: dict[str, tuple[Callable, str, int]] = {
    "a weight": (lambda m, x: normed(m.write(x) * m.scale), "write.weight", 4),
    "a weight the other way round": (lambda m, x: normed(x @ m.turned * m.scale), "turned", 4),
    "a bias": (lambda m, x: normed((m.write(x) + m.bias) * m.scale), "bias", 1),
    "a table of places": (lambda m, x: normed((m.write(x) + m.places) * m.scale), "places", 3),
    "a table of as many places as channels": (
        lambda m, x: normed((m.write(x.reshape(1, 6, 4)) + m.queries) * m.scale),
        "queries",
        6,
    ),
    "a weight, flattened": (lambda m, x: normed(m.write(x).reshape(6, 6) * m.scale), "write.weight", 4),
}
TRAPS: dict[str, tuple[Callable, str]] = {
    "one number": (lambda m, x: normed((m.write(x) + m.one) * m.scale), "one"),
    "one number without an axis": (lambda m, x: normed((m.write(x) + m.number) * m.scale), "number"),
    "a number for each of as many places as channels": (
        lambda m, x: normed((m.write(x.reshape(1, 6, 4)) + m.column) * m.scale),
        "column",
    ),
    "channels in another shape": (lambda m, x: normed(m.wide(x).reshape(2, 6, 6) * m.scale), "wide.weight"),
    "what a linear map reads": (lambda m, x: normed(m.square(m.queries) * m.scale) + x.sum(), "queries"),
    "a weight that is read elsewhere": (
        lambda m, x: normed(m.write(x) * m.scale) + torch.tanh(m.write.weight.sum()),
        "write.weight",
    ),
    "a product that is read elsewhere": (
        lambda m, x: normed(h := m.write(x) * m.scale) + torch.tanh(h),
        "write.weight",
    ),
    "a non-linear function between": (lambda m, x: normed(torch.sin(m.write(x)) * m.scale), "write.weight"),
    "no mean is subtracted": (lambda m, x: F.rms_norm(m.write(x) * m.scale, (6,)), "write.weight"),
    "a factor that data decides": (lambda m, x: normed(m.write(x) * torch.sin(m.write(x * x))), "write.weight"),
    "data is added": (lambda m, x: normed((torch.sin(m.write(x)) + m.write(x)) * m.scale), "write.weight"),
}


@pytest.mark.parametrize(("forward", "name", "dof"), HOLDS.values(), ids=list(HOLDS))
def test_the_mean_behind_a_factor_is_dead(true_claims: Callable, forward: Callable, name: str, dof: int) -> None:
    torch.manual_seed(0)
    graph, found = true_claims(Normed(forward), X)
    assert sum(c.dof for c in found if c.code == "DW005" and c.node == graph.node_of[name]) == dof


@pytest.mark.parametrize(("forward", "name"), TRAPS.values(), ids=list(TRAPS))
def test_a_mean_with_one_condition_missing_is_alive(true_claims: Callable, forward: Callable, name: str) -> None:
    torch.manual_seed(0)
    graph, found = true_claims(Normed(forward), X)
    assert not any(c.code == "DW005" and c.node == graph.node_of[name] for c in found)
