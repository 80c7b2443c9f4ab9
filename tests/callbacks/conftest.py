"""A model with a dead key bias, and one without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=bias)
        self.read = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor] | Tensor:
        logits = self.read(((self.q(x) @ self.k(x).mT).softmax(-1) @ x).mean(1))
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def attention() -> Callable[..., Attention]:
    def build(*, bias: bool) -> Attention:
        torch.manual_seed(0)
        return Attention(bias=bias)

    return build


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(5, 8, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(12)
    ]
