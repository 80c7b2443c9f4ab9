"""What a weight writes alike to all channels of a norm: LayerNorm over channels that stand first, and GroupNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 4, 4, generator=GENERATOR)
TIME = torch.randn(2, 5, generator=GENERATOR)
WIDTH, GROUPS = 4, 2


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of an image, spelled out; without `centred`, only its length is divided out."""

    def __init__(self, centred: bool = True) -> None:
        super().__init__()
        self.centred, self.weight, self.bias = (
            centred,
            nn.Parameter(torch.ones(WIDTH)),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True) if self.centred else x
        x = x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def stem(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, WIDTH, 2), norm, nn.GELU(), nn.Conv2d(WIDTH, 3, 2))


class TimeBlock(nn.Module):
    """A residual block of a diffusion U-Net: an embedding of time is added to every place before a GroupNorm."""

    def __init__(self, norm: nn.Module, skip: bool = False) -> None:
        super().__init__()
        self.conv, self.time, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(5, WIDTH), norm
        self.out, self.skip = nn.Conv2d(WIDTH, 3, 3, padding=1), skip

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv(x) + self.time(time)[:, :, None, None]
        read = self.out(torch.nn.functional.silu(self.norm(h)))
        return read + h[:, :3] if self.skip else read


def test_the_mean_over_channels_is_dead_before_a_layernorm_that_is_spelled_out(examine) -> None:
    result = examine(stem(ChannelNorm()), X)
    assert sum(f.dof for f in result.found("DW005", "0.weight")) == 3 * 2 * 2
    assert sum(f.dof for f in result.found("DW005", "0.bias")) == 1


def test_it_is_alive_where_no_mean_is_subtracted(examine) -> None:
    assert examine(stem(ChannelNorm(centred=False)), X).dof("DW005") == 0


def test_the_mean_over_a_group_of_an_embedding_of_time_is_dead(examine) -> None:
    result = examine(TimeBlock(nn.GroupNorm(GROUPS, WIDTH)), X, TIME)
    assert sum(f.dof for f in result.found("DW004", "time.weight")) == GROUPS * 5


@pytest.mark.parametrize("block", [TimeBlock(nn.GroupNorm(GROUPS, WIDTH), skip=True), TimeBlock(nn.Identity())])
def test_it_is_alive_where_something_else_reads_the_sum(examine, block: nn.Module) -> None:
    assert not examine(block, X, TIME).found("DW004", "time.weight")
