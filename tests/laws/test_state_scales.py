"""State-space models: each state of the scan trades a scale between what is written to it and what reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, STATES, STEPS = 4, 3, 5
X = torch.randn(6, STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


class Scan(nn.Module):
    """h ← a·h + b·x for each channel and state, y = h·c; `first` is the state before, `step` what else is done."""

    def __init__(self, first: Callable = torch.zeros, step: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.into, self.read = nn.Linear(WIDTH, STATES, bias=False), nn.Linear(WIDTH, STATES, bias=False)
        self.decay, self.out = nn.Linear(WIDTH, WIDTH * STATES), nn.Linear(WIDTH, 2)
        self.first, self.step = first, step

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.sigmoid(self.decay(x)).unflatten(-1, (WIDTH, STATES))
        written = torch.tanh(x).unsqueeze(-1) * self.into(x).unsqueeze(-2)
        state, results = self.first(len(x), WIDTH, STATES, dtype=x.dtype), []
        for t in range(STEPS):
            state = self.step(decay[:, t] * state + written[:, t])
            results.append((state @ self.read(x)[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.tanh(self.out(F.silu(torch.stack(results, 1))))


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a state that starts at zero": (Scan, STATES),
    "a state that starts at one": (lambda: Scan(first=torch.ones), 0),
    "a state behind tanh": (lambda: Scan(step=torch.tanh), 0),
    "states that are mixed": (lambda: Scan(step=lambda h: h + h.flip(-1)), 0),  # a common scale is not found
}


@pytest.mark.parametrize(("make", "scales"), CASES.values(), ids=list(CASES))
def test_each_state_has_a_scale(true_claims: Callable, make: Callable[[], nn.Module], scales: int) -> None:
    _, found = true_claims(make(), X.double())
    assert sum(c.dof for c in found if c.code == "DW009") == scales


def test_the_account_of_a_scan_closes(examine: Callable) -> None:
    told = examine(Scan(), X, complete=True)
    assert told.audit.completeness is not None
    assert told.audit.completeness.measured == told.audit.completeness.explained == STATES
