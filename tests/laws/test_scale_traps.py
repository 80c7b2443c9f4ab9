"""Traps for the factor per channel behind a linear map: each lacks one condition, and no scale may be claimed.

Every claim is moved along, in float64, and must leave the outputs and the shapes of all parameters as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 4, generator=SEED, dtype=torch.float64)


class Scaled(nn.Module):
    """A linear map to six channels, and what may stand between it and a factor for each."""

    def __init__(self, forward: Callable) -> None:
        super().__init__()
        self.function = forward
        self.write, self.other = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.square = nn.Linear(6, 6, bias=False)
        self.conv = nn.Conv1d(4, 6, 1, bias=False)
        for name in ("gain", "second", "bias", "shift"):
            setattr(self, name, nn.Parameter(torch.rand(6) + 0.5))
        self.one, self.rows = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(3, 6))
        self.places, self.table = nn.Parameter(torch.rand(3, 1)), nn.Parameter(torch.rand(1, 6))
        self.register_buffer("constant", torch.rand(6))
        self.register_buffer("per_place", torch.rand(3, 6))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def scales(true_claims: Callable, forward: Callable) -> int:
    """The dimensions that are claimed for a gain."""
    torch.manual_seed(0)
    graph, found = true_claims(Scaled(forward), X)
    gains = {graph.node_of[name] for name in ("gain", "one", "rows", "places", "second") if name in graph.node_of}
    return sum(c.dof for c in found if c.code in ("DW004", "DW011") and c.node in gains)


HOLDS: dict[str, tuple[Callable, int]] = {
    "right behind": (lambda m, x: torch.tanh(m.write(x) * m.gain), 6),
    "behind a bias": (lambda m, x: torch.tanh((m.write(x) + m.bias) * m.gain), 6),
    "behind two biases": (lambda m, x: torch.tanh((m.write(x) + m.bias + m.second) * m.gain), 6),
    "behind a constant factor": (lambda m, x: torch.tanh((m.write(x) / m.constant) * m.gain), 6),
    "behind a constant, before a shift": (
        lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain + m.shift),
        6,
    ),
    "behind a convolution": (lambda m, x: torch.tanh(m.conv(x.mT) * m.gain.view(6, 1)), 6),
    "1 + w": (lambda m, x: torch.tanh(m.write(x) * (1.0 + m.gain)), 6),
    "one number is the factor": (lambda m, x: torch.tanh(m.write(x) * m.one), 1),
    "a bias for each place": (lambda m, x: torch.tanh((m.write(x) + m.rows) * m.gain), 6),
    "a bias that is subtracted from": (lambda m, x: torch.tanh((m.bias - m.write(x)) * m.gain), 6),
    "a bias behind an alpha": (lambda m, x: torch.tanh(torch.add(m.write(x), m.bias, alpha=2) * m.gain), 6),
    "channels in another order": (lambda m, x: torch.tanh(m.write(x).flip(-1) * m.gain), 6),
    "channels on another axis": (lambda m, x: torch.tanh(m.square(m.write(x)).mT[:, :, :1] * m.gain.view(6, 1)), 6),
}
TRAPS: dict[str, Callable] = {
    "one number for all channels is added": lambda m, x: torch.tanh((m.write(x) + m.one) * m.gain),
    "a factor for each place and channel": lambda m, x: torch.tanh(m.write(x) * m.rows),
    "a factor for each place": lambda m, x: torch.tanh(m.write(x) * m.places),
    "the map is read elsewhere": lambda m, x: (torch.tanh((h := m.write(x)) * m.gain), torch.sin(h)),
    "the weight is read elsewhere": lambda m, x: torch.tanh(m.write(x) * m.gain) + m.write.weight.sum(),
    "the map is used twice": lambda m, x: torch.tanh(m.write(x) * m.gain) + torch.sin(m.write(x * x)),
    "the map is returned": lambda m, x: (torch.tanh((h := m.write(x)) * m.gain), h),
    "the sum is read elsewhere": lambda m, x: (torch.tanh((h := m.write(x) + m.bias) * m.gain), torch.sin(h)),
    "the bias is read elsewhere": lambda m, x: torch.tanh((m.write(x) + m.bias) * m.gain) * m.bias.sum(),
    "the bias is added twice": lambda m, x: torch.tanh((m.write(x) + m.bias) * m.gain) + m.bias,
    "a bias that is computed": lambda m, x: torch.tanh((m.write(x) + torch.sin(m.bias)) * m.gain),
    "data is added": lambda m, x: torch.tanh((m.write(x) + torch.sin(m.other(x))) * m.gain),
    "a constant for each place": lambda m, x: torch.tanh((m.write(x) + m.per_place) * m.gain + m.shift),
    "a constant, and no shift": lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain),
    "a constant, and a shift that is read elsewhere": (
        lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain + m.shift) * m.shift.sum()
    ),
    "a constant, and a shift for each place": (lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain + m.rows)),
    "a constant, and one number as the shift": (lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain + m.one)),
    "a constant, and a shift behind an alpha": (
        lambda m, x: torch.tanh(torch.add((m.write(x) - m.constant) * m.gain, m.shift, alpha=3))
    ),
    "noise, and a shift": lambda m, x: torch.tanh((m.write(x) - torch.rand(6, dtype=x.dtype)) * m.gain + m.shift),
    "a constant, and the product is returned": (
        lambda m, x: (torch.tanh((h := (m.write(x) - m.constant) * m.gain) + m.shift), h)
    ),
    "a constant, and data is added": (
        lambda m, x: torch.tanh((m.write(x) - m.constant) * m.gain + torch.sin(m.other(x)))
    ),
    "what is subtracted is the map": lambda m, x: torch.tanh((m.constant - m.write(x)) * m.gain),
    "what divides is the map": lambda m, x: torch.tanh((m.constant / m.write(x)) * m.gain + m.shift),
    "a quotient that is rounded": (
        lambda m, x: torch.tanh(torch.div(m.write(x), m.constant, rounding_mode="floor") * m.gain)
    ),
    "the gain is read elsewhere": lambda m, x: torch.tanh(m.write(x) * m.gain) * m.gain.sum(),
    "the gain is computed": lambda m, x: torch.tanh(m.write(x) * torch.sin(m.gain)),
    "the gain is the sum of two": lambda m, x: torch.tanh(m.write(x) * (m.gain + m.second)),
    "a non-linear function between": lambda m, x: torch.tanh(torch.sin(m.write(x)) * m.gain),
    "a factor along the places of a convolution": (
        lambda m, x: torch.tanh(F.conv1d(torch.cat([x, x], 1).mT, m.conv.weight) * m.gain)
    ),
}


@pytest.mark.parametrize(("forward", "dof"), HOLDS.values(), ids=list(HOLDS))
def test_a_factor_per_channel_folds_into_the_map_before_it(true_claims: Callable, forward: Callable, dof: int) -> None:
    assert scales(true_claims, forward) == dof


@pytest.mark.parametrize("forward", TRAPS.values(), ids=list(TRAPS))
def test_a_factor_with_one_condition_missing_does_not_fold(true_claims: Callable, forward: Callable) -> None:
    assert scales(true_claims, forward) == 0
