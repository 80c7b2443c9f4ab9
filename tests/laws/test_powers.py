"""Squared units trade s for 1/s²; what mixes powers, or is no power, trades nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deadweight

UNITS = 5


class Unit(nn.Module):
    """A hidden layer with any function in the middle."""

    def __init__(self, between: Callable[[Unit, Tensor], Tensor], width: int = UNITS) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, UNITS), nn.Linear(width, 3), between
        self.after = nn.Parameter(torch.randn(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(self.between(self, self.up(x))))


def counted(between: Callable[[Unit, Tensor], Tensor], width: int = UNITS) -> tuple[int, int]:
    """What DW011 explains, and all that is measured; the parameter that nothing reads is left aside."""
    found = deadweight.audit(Unit(between, width), torch.randn(30, 4), complete=True)
    account = found.completeness
    assert account is not None and not account.unsound
    by_law = dict(account.by_law)
    return by_law.get("DW011", 0), account.measured - by_law.get("DW001", 0) - by_law.get("DW017", 0)


POWERS: dict[str, Callable[[Unit, Tensor], Tensor]] = {
    "squared ReLU": lambda m, h: torch.relu(h).square(),
    "ReLU to the third": lambda m, h: torch.relu(h) ** 3,
    "a square alone": lambda m, h: h**2,
    "a product with itself": lambda m, h: torch.relu(h) * torch.relu(h),
    "a product of two functions of one unit": lambda m, h: h * h.abs(),
    "a square of a square": lambda m, h: h.square().square(),
    "a bias behind the square": lambda m, h: torch.relu(torch.relu(h).square() - m.after),
}
NOT_POWERS: dict[str, Callable[[Unit, Tensor], Tensor]] = {
    "a square beside the unit itself": lambda m, h: h + torch.relu(h).square(),
    "a squared softplus": lambda m, h: nn.functional.softplus(h).square(),
    "a power of two": lambda m, h: 2.0**h,
    "half a power": lambda m, h: (torch.relu(h) + 0.5) ** 0.5,
    "neighbours multiplied": lambda m, h: torch.relu(h) * torch.relu(h).roll(1, -1).square(),
}


@pytest.mark.parametrize("name", POWERS)
def test_a_unit_trades_its_scale_through_a_whole_power(name: str) -> None:
    assert counted(POWERS[name]) == (UNITS, UNITS)


@pytest.mark.parametrize("name", NOT_POWERS)
def test_what_is_no_power_of_one_unit_trades_nothing(name: str) -> None:
    assert counted(NOT_POWERS[name])[0] == 0


def test_a_unit_and_its_square_side_by_side_trade_nothing_that_is_claimed() -> None:
    assert counted(lambda m, h: torch.cat([torch.relu(h), torch.relu(h).square()], -1), 2 * UNITS)[0] == 0
