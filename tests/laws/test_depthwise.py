"""Depthwise convolutions read channel by channel: each channel trades a scale with the linear map that writes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CHANNELS, KERNEL = 3, 4, 2
X = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(0))


class Mixer(nn.Module):
    """A linear map, a convolution along positions, and functions that see every number."""

    def __init__(self, between: Callable[..., Tensor], groups: int, often: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, CHANNELS, bias=bias)
        self.conv = nn.Conv1d(CHANNELS, often * CHANNELS, KERNEL, groups=groups)
        self.out = nn.Linear(often * CHANNELS, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self, self.proj(x).mT)
        return torch.tanh(self.out(F.silu(hidden).mT))


def conv(m: Mixer, x: Tensor) -> Tensor:
    return m.conv(x)


def respelled(m: Mixer, x: Tensor) -> Tensor:
    """As a reference implementation of a kernel calls it."""
    return F.conv1d(x, m.conv.weight.squeeze(1).unsqueeze(1), m.conv.bias, groups=CHANNELS)


CASES: dict[str, tuple[Callable[[], Mixer], int]] = {
    "one kernel for each channel": (lambda: Mixer(conv, CHANNELS), CHANNELS),
    "two kernels for each channel": (lambda: Mixer(conv, CHANNELS, often=2), CHANNELS),
    "a bias before it": (lambda: Mixer(conv, CHANNELS, bias=True), CHANNELS),
    "a weight that is squeezed and unsqueezed": (lambda: Mixer(respelled, CHANNELS), CHANNELS),
    "constant factors before it": (lambda: Mixer(lambda m, x: m.conv(x * torch.arange(1.0, 8.0)), CHANNELS), CHANNELS),
    "channels in pairs": (lambda: Mixer(conv, CHANNELS // 2), 0),
    "an activation before it": (lambda: Mixer(lambda m, x: m.conv(F.silu(x)), CHANNELS), 0),
    "sums of channels before it": (lambda: Mixer(lambda m, x: m.conv(x + x.roll(1, 1)), CHANNELS), 0),
    "kernels that are computed": (
        lambda: Mixer(lambda m, x: F.conv1d(x, torch.tanh(m.conv.weight), groups=CHANNELS), CHANNELS),
        0,
    ),
    "channels that are read without it": (lambda: Mixer(lambda m, x: m.conv(x) + x[..., 1:], CHANNELS), 0),
    "a weight that is read elsewhere": (lambda: Mixer(lambda m, x: m.conv(x) * m.conv.weight.sum(), CHANNELS), 0),
}


@pytest.mark.parametrize(("make", "scales"), CASES.values(), ids=list(CASES))
def test_a_depthwise_convolution_takes_the_scale_of_each_channel(
    true_claims: Callable, make: Callable[[], Mixer], scales: int
) -> None:
    _, found = true_claims(make(), X.double())
    gauges = [c for c in found if c.code in ("DW011", "DW019")]
    assert sum(c.dof for c in gauges) == scales


def test_the_account_of_a_depthwise_convolution_closes(examine: Callable) -> None:
    told = examine(Mixer(conv, CHANNELS), X, complete=True)
    assert told.audit.completeness is not None
    assert told.audit.completeness.measured == told.audit.completeness.explained == CHANNELS


class Fused(nn.Module):
    """One projection for a gate and for what is convolved, behind constant factors for all of it."""

    def __init__(self, *, constant: bool) -> None:
        super().__init__()
        self.proj, self.conv = nn.Linear(WIDTH, 2 * CHANNELS, bias=False), nn.Conv1d(CHANNELS, CHANNELS, 1, groups=4)
        self.out, self.constant = nn.Linear(CHANNELS, 2), constant

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.arange(1.0, 1.0 + 2 * CHANNELS) if self.constant else torch.sin(x[..., :1])
        gate, hidden = (self.proj(x) * factors).chunk(2, -1)
        return torch.tanh(self.out(F.silu(self.conv(hidden.mT).mT) * torch.tanh(gate)))


@pytest.mark.parametrize("constant", [True, False])
def test_a_fused_projection_falls_apart_behind_constant_factors(true_claims: Callable, constant: bool) -> None:
    _, found = true_claims(Fused(constant=constant), X.double())
    assert sum(c.dof for c in found if c.code in ("DW011", "DW019")) == CHANNELS * constant


class Gated(nn.Module):
    """A convolution of positions, a gate behind it, and a linear map that reads the product."""

    def __init__(self, groups: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, groups=groups, bias=False)
        self.gate, self.out, self.between = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 2, bias=False), between

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.between(self.conv(x.mT).mT) * torch.sigmoid(self.gate(x[:, 1:]))))


WRITERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one kernel for each channel": (lambda: Gated(CHANNELS, nn.Identity()), CHANNELS),
    "channels in pairs": (lambda: Gated(CHANNELS // 2, nn.Identity()), CHANNELS),
    "every channel of every other": (lambda: Gated(1, nn.Identity()), CHANNELS),
    "an activation behind it": (lambda: Gated(CHANNELS, nn.GELU()), 0),
}


@pytest.mark.parametrize(("make", "scales"), WRITERS.values(), ids=list(WRITERS))
def test_the_channels_that_a_convolution_writes_trade_scales_with_what_reads_them(
    true_claims: Callable, make: Callable[[], nn.Module], scales: int
) -> None:
    x = torch.randn(5, 7, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, found = true_claims(make(), x)
    assert sum(c.dof for c in found if c.code in ("DW011", "DW019") and "conv" in c.node) == scales


@pytest.mark.parametrize("groups", [1, CHANNELS])
def test_only_a_convolution_that_mixes_channels_leaves_every_basis_of_them(true_claims: Callable, groups: int) -> None:
    chain = nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, KERNEL, groups=groups), nn.Conv1d(CHANNELS, 3, 1), nn.Tanh())
    x = torch.randn(5, CHANNELS, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, found = true_claims(chain, x)
    assert sum(c.dof for c in found if c.code == "DW019") == (CHANNELS**2 if groups == 1 else CHANNELS)
