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


class HeadNorms(nn.Module):
    """Attention whose queries and keys pass a norm of each head, from one fused weight or from three."""

    def __init__(
        self, fused: bool, norm: type[nn.Module] = nn.LayerNorm, read: bool = False, twice: bool = False
    ) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(6, 18)] if fused else [nn.Linear(6, 6) for _ in range(3)])
        self.query_norm, self.key_norm, self.out = norm(3), norm(3), nn.Linear(6, 6)
        self.read, self.twice = read, twice

    def forward(self, x: Tensor) -> Tensor:
        written = torch.cat([m(x) for m in self.maps], -1).unflatten(-1, (6, 3)).transpose(1, 2)
        q, k, v = written[:, :2], written[:, 2:4], written[:, 4:]
        mixed = nn.functional.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        mixed = mixed + q.tanh() if self.read else mixed  # the queries as they are, before their norm
        mixed = mixed + self.maps[0](x.sin())[..., :6].unflatten(-1, (2, 3)).transpose(1, 2) if self.twice else mixed
        return self.out(mixed.transpose(1, 2).flatten(2))


TOKENS = torch.randn(2, 5, 6, generator=GENERATOR)


@pytest.mark.parametrize("fused", [True, False])
def test_the_mean_that_a_weight_writes_is_dead_before_a_layernorm_of_each_head(examine, fused: bool) -> None:
    result = examine(HeadNorms(fused), TOKENS)
    found = [f for f in result.audit.findings if f.code == "DW005" and f.parameter.endswith("weight")]
    assert sum(f.dof for f in found) == 2 * 2 * 6, "queries and keys, two heads, six columns"


def test_it_is_alive_before_an_rms_norm_of_each_head(examine) -> None:
    assert examine(HeadNorms(True, norm=nn.RMSNorm), TOKENS).dof("DW005") == 0


def test_only_keys_lose_their_means_where_something_else_reads_the_queries(examine) -> None:
    result = examine(HeadNorms(False, read=True), TOKENS)
    assert sum(f.dof for f in result.found("DW005", "maps.1.weight")) == 2 * 6
    assert not result.found("DW005", "maps.0.weight")


def test_it_is_alive_in_a_weight_that_is_used_at_two_places(examine) -> None:
    result = examine(HeadNorms(False, twice=True), TOKENS)
    assert not result.found("DW005", "maps.0.weight")
    assert result.found("DW005", "maps.1.weight")
