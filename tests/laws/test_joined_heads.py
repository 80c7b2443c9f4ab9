"""A norm over several heads side by side leaves rotations of the values that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

WIDTH, SIZE = 5, 4
X = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROTATIONS = SIZE * (SIZE - 1) // 2


class Heads(nn.Module):
    """Two heads with weights of their own read the same values; `join` says what the norm gets of them."""

    def __init__(self, norm: Callable[[int], nn.Module], join: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, SIZE, bias=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.out, self.join = norm(width), nn.Linear(width, 3, bias=False), join

    def forward(self, x: Tensor) -> Tensor:
        first, second = (torch.softmax(s @ x.mT, -1) @ self.values(x) for s in self.scores(x).chunk(2, -1))
        return torch.tanh(self.out(self.norm(self.join(first, second))))


def joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


def without_gain(width: int) -> nn.Module:
    return nn.RMSNorm(width, elementwise_affine=False)


def centred(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "RMSNorm": (lambda: Heads(without_gain, joined, 2 * SIZE), ROTATIONS),
    "RMSNorm with a gain for each channel of each head": (lambda: Heads(nn.RMSNorm, joined, 2 * SIZE), ROTATIONS),
    "LayerNorm": (lambda: Heads(centred, joined, 2 * SIZE), (SIZE - 1) * (SIZE - 2) // 2),
    "half of the second head": (lambda: Heads(without_gain, lambda a, b: joined(a, b[..., :2]), SIZE + 2), 2),
    "half of both heads": (lambda: Heads(without_gain, lambda a, b: joined(a[..., :2], b[..., :2]), SIZE), 0),
    "a head beside other numbers": (
        lambda: Heads(without_gain, lambda a, b: joined(a, torch.ones(3, 6, SIZE, dtype=torch.float64)), 2 * SIZE),
        ROTATIONS,
    ),
    "a square before the norm": (lambda: Heads(without_gain, lambda a, b: joined(a, b * b), 2 * SIZE), 0),
    "channels of both heads in turn": (
        lambda: Heads(without_gain, lambda a, b: torch.stack([a, b], -1).flatten(-2), 2 * SIZE),
        ROTATIONS,
    ),
}


@pytest.mark.parametrize(("make", "rotations"), CASES.values(), ids=list(CASES))
def test_values_turn_alike_in_all_heads_that_a_norm_reads(
    true_claims: Callable, make: Callable[[], nn.Module], rotations: int
) -> None:
    with torch.no_grad():
        for parameter in (module := make().double()).parameters():
            parameter.copy_(torch.randn_like(parameter))
    _, found = true_claims(module, X)
    assert sum(c.dof for c in found if c.code in ("DW010", "DW012") and "values" in c.node) == rotations


def test_the_account_of_joined_heads_closes(examine: Callable) -> None:
    told = examine(Heads(nn.RMSNorm, joined, 2 * SIZE), X.float(), complete=True)
    assert told.audit.completeness is not None
    assert told.audit.completeness.measured == told.audit.completeness.explained
