"""Inputs and layers that the small modules of these tests are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, softmax

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
T = torch.tensor([[0, 1, 6, 2, 3], [5, 4, 4, 0, 6]])


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)


def matrix(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


def linear(a: int = 4, b: int = 4) -> nn.Linear:
    return nn.Linear(a, b)


def table(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding(rows, width)


class Buffers(nn.Module):
    """Constants that are stored."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=0.0)


def ln(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=0.0)


def att(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT, -1) @ v
