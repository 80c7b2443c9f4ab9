"""Queries and keys that are normed without gains: only turns that keep the length of a head are free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight

HEADS, SIZE, LENGTH, WIDTH = 2, 4, 5, 8
EPSILON = 1e-3  # so large that the scale of a head is surely live


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPSILON)


class Attention(nn.Module):
    """One layer; `after` is done to queries and keys (batch, position, head, size) before they meet."""

    def __init__(self, after: Callable[[Attention, Tensor], Tensor], key_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.k, self.after, self.key_heads = nn.Linear(WIDTH, key_heads * SIZE, bias=False), after, key_heads
        self.gain = nn.Parameter(torch.rand(SIZE) + 0.5)
        angle = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.3])
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    def rotary(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos + a * -self.sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.after(self, self.q(x).unflatten(-1, (HEADS, SIZE))).transpose(1, 2)
        k = self.after(self, self.k(x).unflatten(-1, (self.key_heads, SIZE))).transpose(1, 2)
        k = k.repeat_interleave(HEADS // self.key_heads, 1)
        v = self.v(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return torch.tanh(self.o((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)))


def free(after: Callable[[Attention, Tensor], Tensor], key_heads: int = HEADS) -> int:
    """What DW009 explains; the account must close."""
    found = deadweight.audit(Attention(after, key_heads), torch.randn(3, LENGTH, WIDTH), complete=True)
    counted = found.completeness
    assert counted is not None and not counted.unsound
    assert counted.measured == counted.explained, [u.why for u in found.unknown]
    return dict(counted.by_law).get("DW009", 0)


CASES: dict[str, tuple[Callable[[Attention, Tensor], Tensor], int]] = {
    "a norm behind rotary positions leaves the angle of each pair": (lambda m, x: normed(m.rotary(x)), HEADS * 2),
    "so does a norm before them": (lambda m, x: m.rotary(normed(x)), HEADS * 2),
    "and a norm of both": (lambda m, x: 1.2 * normed(m.rotary(normed(x))), HEADS * 2),
    "a norm alone leaves every rotation of a head": (lambda m, x: normed(x), HEADS * SIZE * (SIZE - 1) // 2),
    "no norm leaves scales too": (lambda m, x: m.rotary(x), HEADS * 2 * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_turns_that_keep_the_length_of_a_head_are_free(name: str) -> None:
    after, count = CASES[name]
    assert free(after) == count


def test_queries_that_share_keys_turn_together() -> None:
    assert free(lambda m, x: normed(m.rotary(x)), key_heads=1) == 2
    assert free(lambda m, x: normed(x), key_heads=1) == SIZE * (SIZE - 1) // 2


SILENT: dict[str, Callable[[Attention, Tensor], Tensor]] = {
    "a norm that weighs its elements": lambda m, x: F.rms_norm(
        m.rotary(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]), (SIZE,)
    ),
    "a norm by the largest element": lambda m, x: m.rotary(x) / (1 + x.abs().amax(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_weighs_the_elements_of_a_head_leaves_nothing(name: str) -> None:
    assert free(SILENT[name]) == 0


def test_a_mean_that_is_subtracted_leaves_no_angle() -> None:
    found = deadweight.audit(
        Attention(lambda m, x: F.layer_norm(m.rotary(x), (SIZE,), eps=EPSILON)),
        torch.randn(3, LENGTH, WIDTH),
        complete=True,
    )
    assert found.completeness is not None and not found.completeness.unsound
    assert dict(found.completeness.by_law).get("DW009", 0) == 0
