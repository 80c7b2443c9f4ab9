"""Traps for what the readers of a norm take over: its gain (DW006), and the direction that LayerNorm lost (DW008).

Each trap lacks one condition; every claim is moved along, and must leave the outputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

REPEATS = torch.tensor([2, 0, 1, 1])  # as many as there were


class Read(nn.Module):
    """A norm of four channels, and what may read it."""

    def __init__(self, forward: Callable) -> None:
        super().__init__()
        self.function = forward
        self.read, self.second = nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False)
        self.biased, self.square = nn.Linear(4, 5), nn.Linear(4, 4, bias=False)
        self.gain, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4) + 0.5)
        self.one, self.places = nn.Parameter(torch.rand(1) + 0.5), nn.Parameter(torch.rand(3, 1) + 0.5)
        self.two = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def centred(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def four(x: Tensor) -> Tensor:
    """Four places, as many as channels."""
    return torch.cat([x, torch.sin(x[:, :1])], 1)


GAINS: dict[str, tuple[Callable, int]] = {
    "one reader": (lambda m, x: torch.tanh(m.read(rms(x) * m.gain)), 4),
    "two readers": (lambda m, x: torch.tanh(m.read(h := rms(x) * m.gain)) + torch.sin(m.second(h)), 4),
    "one number for all channels": (lambda m, x: torch.tanh(m.read(rms(x) * m.one.expand(4))), 0),
    "one number for two channels": (lambda m, x: torch.tanh(m.read(rms(x) * m.two.repeat_interleave(2))), 0),
    "one number for each place": (lambda m, x: torch.tanh(m.read(rms(x) * m.places)), 0),
    "a gain that is computed": (lambda m, x: torch.tanh(m.read(rms(x) * torch.sin(m.gain))), 0),
    "a gain that is the sum of two": (lambda m, x: torch.tanh(m.read(rms(x) * (m.gain + m.shift))), 0),
    "a gain that is read elsewhere": (lambda m, x: torch.tanh(m.read(rms(x) * m.gain)) * m.gain.sum(), 0),
    "a gain of two norms": (
        lambda m, x: torch.tanh(m.read(rms(x) * m.gain)) + torch.sin(torch.sin(rms(x * x) * m.gain)).sum(),
        0,
    ),
    "a non-linear reader": (lambda m, x: torch.tanh(m.read(h := rms(x) * m.gain)) + torch.sin(h).sum(), 0),
    "the output reads it": (lambda m, x: (torch.tanh(m.read(h := rms(x) * m.gain)), h), 0),
    "a reader that reads something else too": (
        lambda m, x: torch.tanh(m.read(rms(x) * m.gain)) + torch.sin(m.read(x)),
        0,
    ),
    "a reader whose weight is read": (
        lambda m, x: torch.tanh(m.read(rms(x) * m.gain)) + torch.sin(m.read.weight.sum()),
        0,
    ),
    "data is added": (lambda m, x: torch.tanh(m.read(rms(x) * m.gain + x)), 0),
    "channels in another order": (lambda m, x: torch.tanh(m.read((rms(x) * m.gain).flip(-1))), 4),
}
LOST: dict[str, tuple[Callable, int]] = {
    "a reader": (lambda m, x: torch.tanh(m.read(centred(x))), 5),
    "a reader behind a gain": (lambda m, x: torch.tanh(m.read(centred(x) * m.gain)), 5),
    "a reader with a bias, behind gain and shift": (
        lambda m, x: torch.tanh(m.biased(centred(x) * m.gain + m.shift)),
        5,
    ),
    "a shift and no bias": (lambda m, x: torch.tanh(m.read(centred(x) * m.gain + m.shift)), 0),
    "no mean is subtracted": (lambda m, x: torch.tanh(m.read(rms(x))), 0),
    "data is added": (lambda m, x: torch.tanh(m.read(centred(x) + torch.sin(x))), 0),
    "a factor that data decides": (lambda m, x: torch.tanh(m.read(centred(x) * torch.sin(x))), 0),
    "a factor for each place": (lambda m, x: torch.tanh(m.read(centred(x) * m.places)), 0),
    "a factor for all places that data decides": (
        lambda m, x: torch.tanh(m.read(centred(x) * (m.gain * x.mean((0, 1), keepdim=True)))),
        0,
    ),
    "a shift that is weighed": (
        lambda m, x: torch.tanh(m.read(torch.add(centred(x) * m.gain, m.shift, alpha=2))),
        0,
    ),
    "a weight that is read elsewhere": (
        lambda m, x: torch.tanh(m.read(centred(x))) + torch.sin(m.read.weight.sum()),
        0,
    ),
    "a weight that reads something else too": (lambda m, x: torch.tanh(m.read(centred(x))) + torch.sin(m.read(x)), 0),
    "a norm over places as well": (lambda m, x: torch.tanh(m.read(F.layer_norm(x, (3, 4)))), 0),
    "a norm over the places": (lambda m, x: torch.tanh(m.square(centred(x.mT).mT)), 0),
    "as many places as channels, transposed": (lambda m, x: torch.tanh(m.read(centred(four(x)).transpose(1, 2))), 0),
    "as many places as channels, permuted": (lambda m, x: torch.tanh(m.read(centred(four(x)).permute(0, 2, 1))), 0),
    "places and samples transposed": (lambda m, x: torch.tanh(m.read(centred(x).transpose(0, 1))), 5),
    "places and samples permuted": (lambda m, x: torch.tanh(m.read(centred(x).permute(1, 0, 2))), 5),
    "channels selected": (lambda m, x: torch.tanh(m.read(centred(x).index_select(2, torch.tensor([0, 0, 1, 2])))), 0),
    "places selected": (lambda m, x: torch.tanh(m.read(centred(x).index_select(1, torch.tensor([0, 2])))), 5),
    "a non-linear function between": (lambda m, x: torch.tanh(m.read(torch.sin(centred(x)))), 0),
    "a channel cut off": (lambda m, x: torch.tanh(F.linear(centred(x)[..., :3], m.square.weight[:, :3])), 0),
    "channels picked": (lambda m, x: torch.tanh(m.read(centred(x)[..., torch.tensor([0, 0, 1, 2])])), 0),
    "channels repeated": (
        lambda m, x: torch.tanh(m.read(centred(x).repeat_interleave(REPEATS, -1, output_size=4))),
        0,
    ),
    "channels of one vector repeated": (
        lambda m, x: torch.tanh(m.read(centred(x[0, 0]).repeat_interleave(REPEATS, output_size=4))) + x.mean(),
        0,
    ),
    "places repeated": (lambda m, x: torch.tanh(m.read(centred(x).repeat_interleave(2, 1))), 5),
    "channels mixed with places": (lambda m, x: torch.tanh(m.read(centred(x).reshape(2, 4, 3).mT)), 0),
}


def claimed(true_claims: Callable, forward: Callable, code: str, *names: str) -> int:
    torch.manual_seed(0)
    graph, found = true_claims(Read(forward), X)
    nodes = {graph.node_of[name] for name in names if name in graph.node_of}
    return sum(c.dof for c in found if c.code == code and c.node in nodes)


@pytest.mark.parametrize(("forward", "dof"), GAINS.values(), ids=list(GAINS))
def test_a_gain_folds_into_its_readers_if_all_of_them_are_linear(
    true_claims: Callable, forward: Callable, dof: int
) -> None:
    assert claimed(true_claims, forward, "DW006", "gain", "one", "two", "places") == dof


@pytest.mark.parametrize(("forward", "dof"), LOST.values(), ids=list(LOST))
def test_a_reader_has_a_lost_direction_for_each_row_if_it_reads_a_centred_vector(
    true_claims: Callable, forward: Callable, dof: int
) -> None:
    assert claimed(true_claims, forward, "DW008", "read.weight", "biased.weight", "square.weight") == dof
