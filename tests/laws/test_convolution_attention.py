"""Attention whose projections are convolutions of one place: the laws of biases hold as for linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANNELS, HEADS = 8, 2


class ImageAttention(nn.Module):
    """Norm, fused queries, keys and values by heads, and a projection beside a skip, as in diffusion U-Nets."""

    def __init__(self, project: nn.Module, normalise: nn.Module, by_head: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, CHANNELS), nn.Conv1d(CHANNELS, 3 * CHANNELS, 1)
        self.project, self.normalise, self.by_head = project, normalise, by_head

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *sides = x.shape
        x = x.reshape(batch, channels, -1)
        qkv = self.qkv(self.norm(x))
        if self.by_head:
            q, k, v = qkv.reshape(batch * HEADS, 3 * channels // HEADS, -1).chunk(3, 1)
        else:
            q, k, v = (part.reshape(batch * HEADS, channels // HEADS, -1) for part in qkv.chunk(3, 1))
        weights = self.normalise(torch.einsum("bct,bcs->bts", q, k))
        read = torch.einsum("bts,bcs->bct", weights, v).reshape(batch, channels, -1)
        return (x + self.project(read)).reshape(batch, channels, *sides)


def attention(project: nn.Module | None = None, normalise: nn.Module | None = None, by_head: bool = True) -> nn.Module:
    project = nn.Conv1d(CHANNELS, CHANNELS, 1) if project is None else project
    return ImageAttention(project, normalise or nn.Softmax(-1), by_head)


X = torch.randn(2, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(0))


def test_key_biases_are_dead_and_value_biases_fold_into_the_projection(examine) -> None:
    for by_head in (True, False):
        result = examine(attention(by_head=by_head), X)
        assert (result.dof("DW002"), result.dof("DW003")) == (CHANNELS, CHANNELS)


def test_a_padded_projection_takes_no_value_bias_over(examine) -> None:
    result = examine(attention(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)), X)
    assert (result.dof("DW002"), result.dof("DW003")) == (CHANNELS, 0)


def test_weights_that_do_not_sum_to_one_keep_both_biases(examine) -> None:
    result = examine(attention(normalise=nn.Sigmoid()), X)
    assert (result.dof("DW002"), result.dof("DW003")) == (0, 0)
