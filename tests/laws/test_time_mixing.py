"""A norm's gain folds through a mix with the position before; a state that a loop writes out trades its scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Mixing(nn.Module):
    """Each channel mixes a position with the one before; before the first there are zeros."""

    def __init__(self, between: nn.Module, before: float = 0.0) -> None:
        super().__init__()
        self.norm, self.read = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 3, bias=False)
        self.between, self.mix, self.before = between, nn.Parameter(torch.rand(8)), before

    def forward(self, x: Tensor) -> Tensor:
        here = self.norm(x)
        last = F.pad(self.between(here), (0, 0, 1, -1), value=self.before)
        return torch.tanh(self.read(here * self.mix + last * (1 - self.mix)))


class Decay(nn.Module):
    """A state that is written out step by step."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.value, self.gate, self.read = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 3)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.value(x), torch.sigmoid(self.gate(x))
        out, state = torch.ones_like(values), torch.zeros_like(values[:, 0])
        for t in range(x.shape[1]):
            state = gates[:, t] * state + values[:, t]
            if t >= self.first:
                out[:, t] = state
        return torch.tanh(self.read(out))


def test_the_gain_of_a_norm_folds_through_a_mix_of_positions(examine: Callable) -> None:
    result = examine(Mixing(nn.Identity()), X, complete=True)
    assert result.dof("DW006") == 8
    assert result.audit.completeness.measured == result.audit.completeness.explained == 8


def test_it_does_not_if_the_position_before_passes_an_activation(examine: Callable) -> None:
    assert examine(Mixing(nn.Tanh()), X).dof("DW006") == 0


def test_it_does_not_if_a_number_stands_before_the_first_position(examine: Callable) -> None:
    assert examine(Mixing(nn.Identity(), before=1.0), X).dof("DW006") == 0


def test_a_state_that_a_loop_writes_out_trades_its_scale(examine: Callable) -> None:
    result = examine(Decay(), X, complete=True)
    assert result.dof("DW011") == 4
    assert result.audit.completeness.measured == result.audit.completeness.explained == 4


def test_it_does_not_if_a_step_stays_what_it_was(examine: Callable) -> None:
    assert examine(Decay(first=1), X).dof("DW011") == 0
