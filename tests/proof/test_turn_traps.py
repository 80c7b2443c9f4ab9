"""Traps for the turn rules: each module lacks one condition of a rule, and a gauge claimed all the same would be false.

Whatever the search claims is held against the outputs, and the group of the space that `write` writes is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.laws.catalogue import search
from deadweight.search.prover import Prover
from deadweight.search.turns import dimension, spaces

SEED = torch.Generator().manual_seed(0)
X, WIDE = (torch.randn(2, 3, n, generator=SEED, dtype=torch.float64) for n in (4, 6))
TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0]])
ANGLES = torch.tensor([[0.3], [1.1], [2.5]], dtype=torch.float64)
INFINITE = float("inf")


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


def two_ways(h: Tensor) -> Tensor:
    """The space, and beside it along the positions the space in another order."""
    return torch.cat([h, h.flip(-1)], 1)


def several(h: Tensor, count: int) -> Tensor:
    return sum(h.roll(k, -1) * (k + 1.0) for k in range(count))  # type: ignore[return-value]


def normed(h: Tensor) -> Tensor:
    return F.rms_norm(h, (h.shape[-1],), eps=1e-12)


def recur(m: Any, gates: Tensor, hidden: Tensor, square: Tensor | None = None) -> Tensor:
    weights = [m.write.weight, m.square.weight if square is None else square]
    return torch.rnn_relu(gates, hidden, weights, False, 1, 0.0, False, False, True)[0]


def joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


def beside(h: Tensor, more: Tensor) -> Tensor:
    return torch.cat([h, more], 1)


def crossed(h: Tensor, factor: Tensor) -> Tensor:
    """Twice the space, where a factor multiplies one half of either copy."""
    a, b = halves(h)
    return torch.cat([factor * a, b, a, factor * b], -1)


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[..., :3], h[..., 3:]


def with_half(h: Tensor, data: Tensor) -> Tensor:
    """The space, and beside it along the positions one half of it with data in place of the other."""
    return torch.cat([h, joined(h[..., :3], data[..., :3])], 1)


def doubled(weights: Tensor, h: Tensor) -> Tensor:
    return joined((weights @ (2.0 * h))[..., :3], (weights @ h * 2.0)[..., 3:])


def two_positions(h: Tensor, alpha: float) -> Tensor:
    return torch.add(h[:, :1], h[:, 1:2], alpha=alpha)


def apart(h: Tensor, first: Callable, second: Callable) -> Tensor:
    """One function of each half; the sign keeps the weight from falling apart into two."""
    a, b = halves(-h)
    return joined(first(a), second(b))


def parts() -> dict[str, Any]:
    vectors = {name: torch.rand(6) + 0.5 for name in ("gain", "other_gain", "bias")}
    return {
        "write": linear(4, 6),
        "read": linear(6, 3),
        "square": linear(6, 6),
        "key": linear(4, 6),
        "short": linear(3, 3),
        "wide": linear(12, 3),
        "thin": linear(4, 1),
        "into": torch.randn(6, 4, 1),
        "from_three": torch.randn(6, 3, 1),
        "mix": torch.randn(6, 6, 1),
        "halves": torch.randn(6, 3, 1),
        "one": torch.randn(1),
        "three": torch.randn(3),
        "table": torch.randn(2, 3),
        "batches": torch.randn(2, 3, 6),
        "nine": torch.randn(9),
        "twelve": torch.rand(12) + 0.5,
        "extra": torch.randn(2, 1, 3),
        "seven": linear(7, 3),
        "spare": linear(6, 3),
        "squares": torch.randn(2, 6, 6),
        "counts": nn.Parameter(torch.arange(6), requires_grad=False),
        "steps": nn.Parameter(torch.arange(24).reshape(4, 6), requires_grad=False),
        **vectors,
    }


# (m, x, w, i) → outputs, and the dimension of the group of what `write` writes
TRAPS: dict[str, tuple[Callable, int]] = {
    "gains that differ side by side": (
        lambda m, x, w, i: m.read(torch.cat([m.write(x) * m.gain, m.write(x) * m.other_gain], 1)),
        0,
    ),
    "gains that differ in a sum": (lambda m, x, w, i: m.read(m.write(x) * m.gain + m.write(x) * m.other_gain), 6),
    "gains that differ in a sum, normed": (
        lambda m, x, w, i: m.read(normed(m.write(x) * m.gain + m.write(x * x) * m.other_gain)),
        0,
    ),
    "one channel behind a gain, and zeros beside it": (
        lambda m, x, w, i: m.read(F.pad(m.thin(x) * m.one, (0, 5)) + F.pad(m.thin(x) * m.one, (5, 0))),
        0,
    ),
    "channels in another order behind a gain": (lambda m, x, w, i: m.read((m.write(x) * m.gain).flip(-1)), 0),
    "channels cut apart behind a gain": (
        lambda m, x, w, i: m.read(torch.cat((m.write(x) * m.gain).chunk(2, -1)[::-1], -1)),
        0,
    ),
    "two orders, picked by data": (lambda m, x, w, i: m.read(two_ways(m.write(x))[:, i[0]]), 0),
    "two orders, selected by data": (lambda m, x, w, i: m.read(two_ways(m.write(x)).index_select(1, i[0])), 0),
    "two orders, read": (lambda m, x, w, i: m.read(two_ways(m.write(x))), 0),
    "factors per channel, picked by data": (lambda m, x, w, i: m.read((m.write(x) * torch.tanh(w))[:, i[0]]), 0),
    "factors per channel, normed": (lambda m, x, w, i: m.read(normed(m.write(x) * torch.tanh(w))), 0),
    "sums of coordinates, picked by data": (lambda m, x, w, i: m.read(several(m.write(x), 2)[:, i[0]]), 0),
    "sums of coordinates, selected by data": (
        lambda m, x, w, i: m.read(several(m.write(x), 2).index_select(1, i[0])),
        0,
    ),
    "sums of coordinates, read": (lambda m, x, w, i: m.read(several(m.write(x), 2)), 0),
    "sums of coordinates, normed": (lambda m, x, w, i: m.read(normed(several(m.write(x), 2))), 0),
    "sums of coordinates and a bias": (lambda m, x, w, i: (several(m.write(x), 2) + m.bias) @ m.key(x).mT, 0),
    "sums of coordinates, weighed": (
        lambda m, x, w, i: m.read(torch.softmax(x @ x.mT, -1) @ several(m.write(x), 2)),
        0,
    ),
    "too many coordinates": (lambda m, x, w, i: several(m.write(x), 5) @ m.key(x).mT, 0),
    "too many coordinates, read": (lambda m, x, w, i: m.read(several(m.write(x), 5)), 0),
    "a quotient that is rounded": (lambda m, x, w, i: m.read(torch.div(m.write(x), 2.0, rounding_mode="floor")), 0),
    "a product with data along the coordinates": (lambda m, x, w, i: m.read(m.write(x) @ (w.mT @ w)), 0),
    "a vector times data": (lambda m, x, w, i: m.read(m.write(x)[0, 0] @ (w.mT @ w)[0]), 0),
    "a gain before a norm": (lambda m, x, w, i: m.read(normed(m.write(x) * m.gain)), 0),
    "a norm over five coordinates and a stranger": (
        lambda m, x, w, i: m.read(normed(torch.cat([m.write(x)[..., :5], x[..., :1]], -1))),
        10,  # rotations of the five
    ),
    "a norm over some coordinates twice": (
        lambda m, x, w, i: m.read(normed(joined(h := -m.write(x), h[..., :3]))[..., :6]),
        6,  # rotations of the three that stand there twice, and of the other three
    ),
    "a norm over the space, and over a part of it beside data": (
        lambda m, x, w, i: (m.read((n := normed(with_half(-m.write(x), w)))[:, :3]), n[:, 3:, 3:]),
        0,
    ),
    "a norm over all coordinates twice": (lambda m, x, w, i: m.read(normed(joined(h := -m.write(x), h))[..., :6]), 15),
    "a gain over a part of the space": (
        lambda m, x, w, i: m.read(joined((h := -m.write(x))[..., :3] * m.three, h[..., 3:])),
        3 + 9,
    ),
    "a gain over the space and data beside it": (
        lambda m, x, w, i: m.wide(joined(m.write(x), torch.sin(w)) * m.twelve),
        36,
    ),
    "a gain over two copies of the space": (lambda m, x, w, i: m.wide(joined(h := m.write(x), h) * m.twelve), 36),
    "a gain over data alone": (lambda m, x, w, i: m.wide(joined(m.write(x), torch.sin(w) * m.gain)), 36),
    "a layer behind a gain": (lambda m, x, w, i: m.read((h := m.write(x)) + m.square(h) * m.gain), 36),
    "a layer in another order behind a gain": (
        lambda m, x, w, i: m.read((h := m.write(x)) + m.square(h).flip(-1) * m.gain),
        0,
    ),
    "a layer in other places behind a gain": (
        lambda m, x, w, i: m.read((h := m.write(x)) + m.square(h).reshape(2, 3, 2, 3).mT.reshape(2, 3, 6) * m.gain),
        0,
    ),
    "a norm behind a gain": (
        lambda m, x, w, i: m.read((h := m.write(x)) + normed(m.square(h)).mean(1, keepdim=True) * m.gain),
        0,
    ),
    "a bias behind a gain, seen otherwise": (
        lambda m, x, w, i: m.read((h := m.write(x)) + (m.square(h) + m.bias.view(1, 1, 6)) * m.gain),
        0,
    ),
    "a number behind a gain": (lambda m, x, w, i: m.read((h := m.write(x)) + (m.square(h) + 1.0) * m.gain), 0),
    "two layers behind a gain": (
        lambda m, x, w, i: m.read((h := m.write(x)) + (m.square(h) + m.square(torch.sin(h))) * m.gain),
        0,
    ),
    "a sum over coordinates on another axis": (lambda m, x, w, i: m.short(m.write(x).mT.sum(1)), 0),
    "halves, one divided and one multiplied": (
        lambda m, x, w, i: m.read(apart(m.write(x), lambda a: a / 2.0, lambda b: b * 2.0)),
        2 * 9,
    ),
    "halves, one divided and one multiplied by data": (
        lambda m, x, w, i: m.read(apart(m.write(x), lambda a: a / w[..., :1], lambda b: b * w[..., :1])),
        2 * 9,
    ),
    "halves, one averaged and one summed": (
        lambda m, x, w, i: m.read(apart(m.write(x), lambda a: a.mean(1), lambda b: b.sum(1))),
        2 * 9,
    ),
    "halves, a sum and a difference": (
        lambda m, x, w, i: m.read(apart(m.write(x), lambda a: a[:, :1] + a[:, 1:2], lambda b: b[:, :1] - b[:, 1:2])),
        2 * 9,
    ),
    "halves, sums of different weights": (
        lambda m, x, w, i: m.read(apart(m.write(x), lambda a: two_positions(a, 1.0), lambda b: two_positions(b, 2.0))),
        2 * 9,
    ),
    "halves, doubled before a weighed sum and behind it": (
        lambda m, x, w, i: m.read(doubled(torch.softmax(x @ x.mT, -1), -m.write(x))),
        36,
    ),
    "a choice between two orders": (
        lambda m, x, w, i: m.read(torch.where(x[..., :1] > 0, h := m.write(x), h.flip(-1))),
        0,
    ),
    "a choice between the space and data": (lambda m, x, w, i: m.read(torch.where(x[..., :1] > 0, m.write(x), w)), 0),
    "a bias that is one number": (lambda m, x, w, i: m.read(m.write(x) + m.one.expand(6)), 0),
    "a bias that is stored as a matrix": (lambda m, x, w, i: m.read(m.write(x) + m.table.reshape(6)), 36),
    "a bias that is repeated": (lambda m, x, w, i: m.read(m.write(x) + m.three.expand(2, 3).reshape(6)), 0),
    "a bias for each head": (
        lambda m, x, w, i: m.read((m.write(x).unflatten(-1, (2, 3)) + m.table).flatten(-2)),
        36,
    ),
    "a bias that is read in two orders": (
        lambda m, x, w, i: m.read(m.write(x) + m.table.reshape(6)) + torch.sin(m.table.mT.reshape(6)).sum(),
        0,
    ),
    "a bias that counts": (lambda m, x, w, i: m.read(m.write(x) + m.counts), 0),
    "a table that counts": (lambda m, x, w, i: m.read(m.write(x) + F.embedding(i, m.steps)), 0),
    "a weight that counts": (lambda m, x, w, i: m.read(F.linear(x, m.steps.mT.to(x.dtype)) + m.write(x)), 0),
    "a reader that counts": (lambda m, x, w, i: F.linear(m.write(x), m.steps.to(x.dtype)), 0),
    "a bias of a query that is read elsewhere": (
        lambda m, x, w, i: (m.write(x) + m.bias) @ m.key(x).mT * torch.tanh(m.bias.sum()),
        0,
    ),
    "a reader whose weight is computed": (lambda m, x, w, i: F.linear(m.write(x), torch.tanh(m.square.weight)), 0),
    "a vector whose reader's weight is computed": (
        lambda m, x, w, i: F.linear(m.write(x)[0, 0], torch.tanh(m.square.weight)),
        0,
    ),
    "a reader whose weight is a vector": (lambda m, x, w, i: F.linear(m.write(x), m.bias), 0),
    "a reader whose weight is the space": (lambda m, x, w, i: F.linear(w[0], m.write(x)[0]), 0),
    "a reader that is read the other way round too": (
        lambda m, x, w, i: torch.tanh(m.square(m.write(x))) + F.linear(m.write(x), m.square.weight.t()),
        0,
    ),
    "a reader that reads two orders": (
        lambda m, x, w, i: torch.tanh(m.read(h := m.write(x))) + torch.sin(m.read(h.flip(-1))),
        0,
    ),
    "a reader behind two gains": (
        lambda m, x, w, i: torch.tanh(m.read(m.write(x) * m.gain)) + torch.sin(m.read(m.write(x) * m.other_gain)),
        0,
    ),
    "a reader behind a gain and behind none": (
        lambda m, x, w, i: torch.tanh(m.read(m.write(x) * m.gain)) + torch.sin(m.read(m.write(x))),
        0,
    ),
    "a reader of copies that fall apart otherwise the second time": (
        lambda m, x, w, i: torch.tanh(m.wide(joined(h := -m.write(x), h))) + torch.sin(m.wide(crossed(h, w[..., :1]))),
        0,
    ),
    "a reader that is returned the other way round": (lambda m, x, w, i: (m.read(m.write(x)), m.read.weight.t()), 0),
    "a writer that is returned the other way round": (lambda m, x, w, i: (m.read(m.write(x)), m.write.weight.t()), 0),
    "a table with more axes than the space": (lambda m, x, w, i: m.read(m.write(x[0]) + m.batches), 36),
    "a square table with more axes than the space": (
        lambda m, x, w, i: m.read(m.write(x.flatten(0, 1)) + m.squares),
        36,
    ),
    "weights without an axis of results": (lambda m, x, w, i: m.read(torch.softmax(m.three, 0) @ m.write(x)), 0),
    "coordinates that data picks": (lambda m, x, w, i: m.read(m.write(x)[..., i.flatten()]), 0),
    "a coordinate that data picks": (lambda m, x, w, i: m.short(m.write(x)[..., i[0, 0]]), 0),
    "zeros beside": (lambda m, x, w, i: m.read(beside(m.write(x), torch.zeros(2, 1, 6, dtype=x.dtype))), 36),
    "nothing beside": (lambda m, x, w, i: m.read(beside(m.write(x), torch.zeros(2, 0, 6, dtype=x.dtype))), 36),
    "nothing of another rank beside": (
        lambda m, x, w, i: m.read(beside(m.write(x), torch.zeros(0, dtype=x.dtype))),
        36,
    ),
    "ones beside": (lambda m, x, w, i: m.read(beside(m.write(x), torch.ones(2, 1, 6, dtype=x.dtype))), 0),
    "a vector beside": (lambda m, x, w, i: m.read(beside(m.write(x), m.bias.expand(2, 1, 6))), 36),
    "a vector beside that is stored as a matrix": (
        lambda m, x, w, i: m.read(beside(m.write(x), m.table.reshape(1, 1, 6).expand(2, 1, 6))),
        0,
    ),
    "a vector beside that repeats another": (
        lambda m, x, w, i: m.read(beside(m.write(x), m.three.repeat(2).expand(2, 1, 6))),
        0,
    ),
    "a part of a vector beside": (lambda m, x, w, i: m.read(beside(m.write(x), m.nine[:6].expand(2, 1, 6))), 0),
    "a vector beside that is read elsewhere": (
        lambda m, x, w, i: m.read(beside(m.write(x), m.bias.expand(2, 1, 6))) * m.bias.sum(),
        0,
    ),
    "a number beside the coordinates": (lambda m, x, w, i: m.seven(beside(m.write(x).mT, m.extra).mT), 0),
    "sums of coordinates, and zeros beside": (
        lambda m, x, w, i: m.read(beside(several(m.write(x), 2), torch.zeros(2, 1, 6, dtype=x.dtype))),
        0,
    ),
    "sums of coordinates, summed over positions": (lambda m, x, w, i: m.read(several(m.write(x), 2).sum(1)), 0),
    "sums of coordinates behind a gain": (lambda m, x, w, i: m.read(several(m.write(x), 2) * m.gain), 0),
    "two gains, one after the other": (lambda m, x, w, i: m.read(m.write(x) * m.gain * m.other_gain), 6),
    "a quotient of two that are scaled": (lambda m, x, w, i: m.read(torch.relu(h := m.write(x)) / h.abs()), 0),
    "a product of two that are scaled": (lambda m, x, w, i: m.read(torch.relu(h := m.write(x)) * h.abs()), 6),
    "sums of coordinates times the space": (lambda m, x, w, i: m.read(several(h := m.write(x), 2) * h), 0),
    "sums of coordinates, squared": (lambda m, x, w, i: m.read(several(m.write(x), 2) ** 2), 0),
    "a power that is learned": (lambda m, x, w, i: m.read(torch.relu(m.write(x)) ** m.one), 0),
    "a bias added to two orders": (
        lambda m, x, w, i: torch.sin(m.read(m.write(x) + m.bias)) + m.spare(m.write(x).flip(-1) + m.bias),
        0,
    ),
    "a bias added twice": (
        lambda m, x, w, i: torch.sin(m.read(m.write(x) + m.bias)) + m.spare(m.write(x * x) + m.bias),
        36,
    ),
    "a bias added behind a gain and behind none": (
        lambda m, x, w, i: torch.sin(m.read(m.write(x) * m.gain + m.bias)) + m.spare(m.write(x) + m.bias),
        6,
    ),
    "a bias that is returned": (lambda m, x, w, i: (m.read(m.write(x) + m.bias), m.bias), 0),
    "a kernel that is computed": (lambda m, x, w, i: F.conv1d(F.conv1d(x.mT, m.into), torch.tanh(m.mix)), 0),
    "a kernel in groups": (lambda m, x, w, i: F.conv1d(F.conv1d(x.mT, m.into), m.mix[:, :3], groups=2), 0),
    "a kernel that is read whole and in groups": (
        lambda m, x, w, i: torch.convolution(F.conv1d(x.mT, m.into), m.halves, None, [1], [0], [1], False, [0], 2),
        0,
    ),
    "a transposed convolution": (
        lambda m, x, w, i: torch.convolution(F.conv1d(x.mT, m.into), m.mix, None, [1], [0], [1], True, [0], 1),
        0,
    ),
    "channels on the first axis": (
        lambda m, x, w, i: F.conv1d(F.conv1d(w[0], m.from_three) * torch.sin(w[0]).sum(0).view(6, 1), m.mix),
        0,
    ),
    "a state that is not zero": (
        lambda m, x, w, i: m.read(recur(m, x, torch.ones(1, 2, 6, dtype=x.dtype))),
        0,
    ),
    "a recurrent weight that is computed": (
        lambda m, x, w, i: m.read(recur(m, x, x.new_zeros(1, 2, 6), torch.tanh(m.square.weight))),
        0,
    ),
    "a state that is the space": (lambda m, x, w, i: m.read(m.rnn(x, m.write(x)[:, 0][None])[0]), 0),
}


@pytest.mark.parametrize(("forward", "free"), TRAPS.values(), ids=list(TRAPS))
def test_a_gauge_with_one_condition_missing_is_not_claimed(
    traced: Callable, assert_flat: Callable, forward: Callable, free: int
) -> None:
    inputs = (X, WIDE, TOKENS)
    rnn = nn.RNN(4, 6, nonlinearity="relu", batch_first=True)
    graph = traced(forward, inputs, **parts(), rnn=rnn)
    proved = [s.turned for s in spaces(Prover(graph)) if s.turned.proved]
    writes = graph.node_of.get("write.weight")
    assert sum(dimension(t) for t in proved if t.sites[0].parameter == writes) == free
    for claim in search(graph).claims:
        assert_flat(graph, claim, inputs)


def rotated(h: Tensor, alpha: float = 1.0) -> Tensor:
    """Three planes, turned by an angle of the position, by a difference and a sum."""
    a, b = h.chunk(2, -1)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    return torch.cat([torch.sub(a * cos, b * sin, alpha=alpha), b * cos + a * sin], -1)


def weighed(h: Tensor) -> Tensor:
    a, b = halves(h)
    return joined(2.0 * a + b / 4.0, b)


def sheared(h: Tensor) -> Tensor:
    """All positions but the first are sheared, by an amount of their own: a map that is not normal."""
    a, b = halves(h[:, 1:])
    return torch.cat([h[:, :1], joined(a + b * ANGLES[1:].sin(), b)], 1)


UNLIKE_SIX = torch.linspace(1.0, 2.0, 6, dtype=torch.float64)
PRODUCTS: dict[str, tuple[Callable, int]] = {
    "queries behind a LayerNorm": (lambda m, x: F.layer_norm(m.write(x), (6,), eps=1e-12) @ m.key(x).mT, 4 + 1),
    "queries, as they are and behind a LayerNorm": (
        lambda m, x: m.write(x) @ m.key(x).mT + F.layer_norm(m.write(x), (6,), eps=1e-12) @ m.key(x).mT,
        0,
    ),
    "queries, as they are and normed": (lambda m, x: m.write(x) @ m.key(x).mT + normed(m.write(x)) @ m.key(x).mT, 15),
    "queries that meet keys in two orders": (
        lambda m, x: torch.tanh(m.write(x) @ m.key(x).mT) + (m.write(x) * UNLIKE_SIX) @ m.key(x).mT,
        6,
    ),
    "queries behind a learned factor": (lambda m, x: torch.tanh((m.write(x) * m.gain) @ m.key(x).mT), 6 + 6),
    "queries that meet data beside keys": (
        lambda m, x: joined(m.write(x), x[..., :3]) @ joined(torch.sin(x[..., :3]), m.key(x)).mT,
        0,
    ),
    "data beside queries and keys": (
        lambda m, x: torch.tanh(joined(m.write(x), torch.sin(x)) @ joined(m.key(x), torch.cos(x)).mT),
        36 - 2 * 2,  # keys and queries are made of four numbers
    ),
    "data added to queries": (
        lambda m, x: torch.tanh((m.write(x) + torch.sin(joined(x, x[..., :2]))) @ m.key(x).mT),
        0,
    ),
    "queries of learned vectors": (lambda m, x: torch.tanh(m.write(m.learned) @ m.key(x).mT), 36 - 2 * 2),
    "queries of learned vectors that are read elsewhere": (
        lambda m, x: torch.tanh((h := m.write(m.learned)) @ m.key(x).mT + h.sum()),
        0,
    ),
    "query heads that meet one key head in two orders": (
        lambda m, x: torch.stack([h := m.write(x), m.square(h).sin() * 0 + h.flip(-1)], 1) @ m.key(x)[:, None].mT,
        0,
    ),
    "sheared queries": (lambda m, x: sheared(m.write(x)) @ m.key(x).mT, 9 * 2),
    "sheared keys": (lambda m, x: m.write(x) @ sheared(m.key(x)).mT, 9 * 2),
    "a reader whose axes keep their order": (
        lambda m, x: torch.tanh(F.linear(m.write(x), m.square.weight.permute(0, 1))),
        36,
    ),
    "turned by a difference": (lambda m, x: rotated(m.write(x)) @ rotated(m.key(x)).mT, 9 * 2),
    "turned by half a difference": (lambda m, x: rotated(m.write(x), 0.5) @ rotated(m.key(x), 0.5).mT, 9),
    "weighed by division": (lambda m, x: weighed(m.write(x)) @ m.key(x).mT, 3 * 4),
    "several coordinates": (lambda m, x: several(m.write(x), 4) @ m.key(x).mT, 36),
}


@pytest.mark.parametrize(("forward", "free"), PRODUCTS.values(), ids=list(PRODUCTS))
def test_what_stands_before_a_product_decides_which_turns_are_free(
    traced: Callable, assert_flat: Callable, forward: Callable, free: int
) -> None:
    vectors = {"gain": torch.rand(6) + 0.5, "learned": torch.randn(8, 4)}
    graph = traced(forward, (X,), write=linear(4, 6), key=linear(4, 6), square=linear(6, 6), **vectors)
    claims = [claim for claim in search(graph).claims if claim.code != "DW001"]
    assert sum(c.dof for c in claims) == free
    for claim in claims:
        assert_flat(graph, claim, (X,))


LONG = torch.randn(1, 30, 4, generator=SEED, dtype=torch.float64)
UNLIKE = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
SLOW = torch.linspace(0.1, 3.0, 30, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)


def turned_slowly(h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return joined(a * SLOW.cos() - b * SLOW.sin(), b * SLOW.cos() + a * SLOW.sin())


def with_one_position(h: Tensor, other: Tensor) -> Tensor:
    return torch.cat([h[:, :17], other[:, 17:18], h[:, 18:]], 1)


def normed_otherwise(h: Tensor) -> Tensor:
    """The length that one position is divided by is that of a vector with other factors."""
    n = normed(with_one_position(r := turned_slowly(h), r * UNLIKE))
    return with_one_position(n, n / UNLIKE)


ONE_POSITION: dict[str, tuple[Callable, int]] = {
    "none": (turned_slowly, 4),
    "one in another order": (lambda h: with_one_position(r := turned_slowly(h), r.flip(-1)), 2),
    "one with factors of its own": (
        lambda h: with_one_position(turned_slowly(h), h * UNLIKE),
        2,
    ),
    "one normed with factors of its own": (normed_otherwise, 0),
    "all normed alike": (lambda h: normed(turned_slowly(h)), 2),
    "one that is not turned": (lambda h: with_one_position(turned_slowly(h), h), 4),
}


@pytest.mark.parametrize(("turn", "free"), ONE_POSITION.values(), ids=list(ONE_POSITION))
def test_one_position_of_many_that_is_turned_otherwise_counts(
    traced: Callable, assert_flat: Callable, turn: Callable, free: int
) -> None:
    forward = lambda m, x: torch.tanh(turn(m.write(x)) @ turned_slowly(m.key(x)).mT)  # noqa: E731
    graph = traced(forward, (LONG,), write=linear(4, 4), key=linear(4, 4))
    claims = search(graph).claims
    for claim in claims:
        assert_flat(graph, claim, (LONG,))
    assert sum(c.dof for c in claims) == free


def test_an_infinite_factor_ends_the_proof(traced: Callable) -> None:
    graph = traced(lambda m, x: m.read(m.write(x) * INFINITE), (X,), write=linear(4, 6), read=linear(6, 3))
    blocked = next(s.turned.blocked for s in spaces(Prover(graph)) if s.seed.op == "linear")
    assert blocked is not None and "no finite number" in blocked.why
