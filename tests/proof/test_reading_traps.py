"""Traps for what reads a norm: a map that reads something else has no direction that LayerNorm lost, a gain no reader.

Every claim that the search makes is moved along, and must leave the outputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.claims.point import Point
from deadweight.laws.catalogue import search

SEED = torch.Generator().manual_seed(0)
X = torch.randn(2, 4, 4, generator=SEED, dtype=torch.float64)  # as many places as channels
FOUR_OF_SIXTEEN = torch.eye(4, dtype=torch.bool).roll(1, 0)
ORDER = torch.tensor([2, 0, 1, 1])
STAYS = 1e-10  # of outputs of order one, after a motion of order one: float64 rounds at about 1e-16


def centred(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-12)


def experts(m: Any, h: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    index = (rows[:, 0] > 0).to(torch.int64)
    return torch.matmul(m.stack[index], rows.unsqueeze(-1)).squeeze(-1)


def packed(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True).data


# (m, x) → outputs, and how many rows have a direction that LayerNorm lost
READERS: dict[str, tuple[Callable, int]] = {
    "the norm": (lambda m, x: m.read(centred(x)), 5),
    "the norm behind a gain and a shift": (lambda m, x: m.biased(centred(x) * m.gain + m.shift), 5),
    "places cut off": (lambda m, x: m.read(centred(x)[:, 1:]), 5),
    "one place": (lambda m, x: m.read(centred(x)[:, 2]), 5),
    "places in another order": (lambda m, x: m.read(centred(x)[:, ORDER]), 5),
    "rows of sequences": (lambda m, x: m.read(packed(centred(x))), 5),
    "places turned with samples": (lambda m, x: m.read(centred(x).transpose(0, 1)), 5),
    "one number repeated": (lambda m, x: m.read(centred(x).square().sum().expand(2, 4)), 0),
    "channels turned with places": (lambda m, x: m.read(centred(x).transpose(1, 2)), 0),
    "channels permuted with places": (lambda m, x: m.read(centred(x).permute(0, 2, 1)), 0),
    "one channel at every place": (lambda m, x: m.read(centred(x)[..., 1]), 0),
    "channels in another order": (lambda m, x: m.read(centred(x)[..., ORDER]), 0),
    "channels selected": (lambda m, x: m.read(centred(x).index_select(2, ORDER)), 0),
    "single numbers that a mask picks": (lambda m, x: m.read(centred(x)[:, FOUR_OF_SIXTEEN]), 0),
    "places and channels flattened": (lambda m, x: m.flat(centred(x).flatten(1)), 0),
    "channels in halves": (lambda m, x: m.halves(centred(x).unflatten(-1, (2, 2))), 0),
    "the norm, by a kernel across the channels": (lambda m, x: F.conv1d(centred(x).mT, m.kernel), 0),
    "the norm, by a kernel across the places": (lambda m, x: F.conv1d(centred(x), m.kernel), 0),
    "the norm, by experts": (lambda m, x: experts(m, centred(x)), 10),  # five rows of each of two experts
    "a norm over places and channels": (lambda m, x: m.read(F.layer_norm(x, (4, 4))), 0),
    "a norm that subtracts no mean": (lambda m, x: m.read(F.rms_norm(x, (4,))), 0),
    "the norm behind one number for all": (lambda m, x: m.read(centred(x) * m.one), 0),
    "the norm behind a table of gains": (lambda m, x: m.read(centred(x) * m.table), 0),
    "the norm behind a table of shifts": (lambda m, x: m.biased(centred(x) + m.table), 0),
    "the norm behind a gain that data has a say in": (lambda m, x: m.read(centred(x) * (m.gain * x[0, 0])), 0),
    "the norm behind a shift that is weighed": (
        lambda m, x: m.biased(torch.add(centred(x), m.shift, alpha=2)),
        0,
    ),
    "the norm less a shift": (lambda m, x: m.biased(centred(x) - m.shift), 0),
    "a quotient by a gain": (lambda m, x: m.read(centred(x) / m.gain), 0),
    "the norm, by a weight that reads data too": (lambda m, x: m.read(centred(x)) + torch.sin(m.read(x)), 0),
    "the norm, by a weight that is returned": (lambda m, x: (m.read(centred(x)), m.read.weight), 0),
}
# What else stands beside a norm.
BESIDE: dict[str, Callable] = {
    "a number of data times a gain": lambda m, x: m.read(x[0, 0, 0] * m.gain + centred(x)),
    "a square of a parameter before a norm": lambda m, x: m.read(centred(x + m.gain * m.gain)),
    "a product of parameters before a norm": lambda m, x: m.read(centred(x + m.gain * m.shift)),
    "a shift that meets a map without a bias": lambda m, x: m.second(centred(x) * m.gain + m.shift),
    "a shift that meets a map without a bias, and one with": lambda m, x: (
        m.second(h := centred(x) * m.gain + m.shift) * torch.sin(m.biased(h))
    ),
    "a shift that meets maps of two norms": lambda m, x: (
        m.second(centred(x) * m.gain + m.shift) + torch.sin(m.second(centred(x * x)))
    ),
}


def parts() -> dict[str, Any]:
    names = {"read": (4, 5), "second": (4, 5), "flat": (16, 5), "halves": (2, 5)}
    return {
        **{name: nn.Linear(*sizes, bias=False) for name, sizes in names.items()},
        "biased": nn.Linear(4, 5),
        "kernel": torch.randn(5, 4, 1),
        "stack": torch.randn(2, 5, 4),
        "gain": torch.rand(4) + 0.5,
        "shift": torch.rand(4) + 0.5,
        "one": torch.rand(1) + 0.5,
        "table": torch.rand(4, 4) + 0.5,
    }


def true_claims(traced: Callable, forward: Callable) -> list[Any]:
    """What the search claims, each of which is moved along."""
    graph = traced(lambda m, x: squashed(forward(m, x)), (X,), **parts())
    values = {n: t.detach() for n, t in graph.tensors.items()}
    point = Point(graph, values, {graph.inputs[0]: X})
    claims = [c for c in search(graph).claims if c.tier != "epsilon"]
    for claim in claims:
        moved = claim.member(point, torch.Generator().manual_seed(1))
        assert all(t.shape == values[n].shape for n, t in moved.items()), claim.law
        for new, old in zip(point.at(moved).outputs, point.outputs, strict=True):
            assert float((new - old).abs().max()) < STAYS, claim.law
    return claims


def squashed(outputs: Any) -> Any:
    return tuple(map(torch.tanh, outputs)) if isinstance(outputs, tuple) else torch.tanh(outputs)


@pytest.mark.parametrize(("forward", "rows"), READERS.values(), ids=list(READERS))
def test_a_reader_loses_a_direction_only_if_it_reads_channels_that_sum_to_zero(
    traced: Callable, forward: Callable, rows: int
) -> None:
    assert sum(c.dof for c in true_claims(traced, forward) if c.code == "DW008") == rows


@pytest.mark.parametrize("forward", BESIDE.values(), ids=list(BESIDE))
def test_what_stands_beside_a_norm_is_claimed_truly_or_not_at_all(traced: Callable, forward: Callable) -> None:
    true_claims(traced, forward)
