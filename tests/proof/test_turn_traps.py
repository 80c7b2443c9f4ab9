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
from deadweight.laws.prover import Prover
from deadweight.laws.turns import dimension, spaces

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


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[..., :3], h[..., 3:]


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
        "into": torch.randn(6, 4, 1),
        "from_three": torch.randn(6, 3, 1),
        "mix": torch.randn(6, 6, 1),
        "halves": torch.randn(6, 3, 1),
        "one": torch.randn(1),
        "three": torch.randn(3),
        "table": torch.randn(2, 3),
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
    "gains that differ in a sum": (lambda m, x, w, i: m.read(m.write(x) * m.gain + m.write(x) * m.other_gain), 0),
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
    "a choice between two orders": (
        lambda m, x, w, i: m.read(torch.where(x[..., :1] > 0, h := m.write(x), h.flip(-1))),
        0,
    ),
    "a choice between the space and data": (lambda m, x, w, i: m.read(torch.where(x[..., :1] > 0, m.write(x), w)), 0),
    "a bias that is one number": (lambda m, x, w, i: m.read(m.write(x) + m.one.expand(6)), 0),
    "a bias that is stored as a matrix": (lambda m, x, w, i: m.read(m.write(x) + m.table.reshape(6)), 0),
    "a bias that is repeated": (lambda m, x, w, i: m.read(m.write(x) + m.three.expand(2, 3).reshape(6)), 0),
    "a bias for each head": (
        lambda m, x, w, i: m.read((m.write(x).unflatten(-1, (2, 3)) + m.table).flatten(-2)),
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
    "a reader whose weight is a vector": (lambda m, x, w, i: F.linear(m.write(x), m.bias), 0),
    "a reader whose weight is the space": (lambda m, x, w, i: F.linear(w[0], m.write(x)[0]), 0),
    "a reader that is read the other way round too": (
        lambda m, x, w, i: torch.tanh(m.square(m.write(x))) + F.linear(m.write(x), m.square.weight.t()),
        0,
    ),
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


PRODUCTS: dict[str, tuple[Callable, int]] = {
    "turned by a difference": (lambda m, x: rotated(m.write(x)) @ rotated(m.key(x)).mT, 9 * 2),
    "turned by half a difference": (lambda m, x: rotated(m.write(x), 0.5) @ rotated(m.key(x), 0.5).mT, 9),
    "weighed by division": (lambda m, x: weighed(m.write(x)) @ m.key(x).mT, 3 * 4),
    "several coordinates": (lambda m, x: several(m.write(x), 4) @ m.key(x).mT, 36),
}


@pytest.mark.parametrize(("forward", "free"), PRODUCTS.values(), ids=list(PRODUCTS))
def test_what_stands_before_a_product_decides_which_turns_are_free(
    traced: Callable, assert_flat: Callable, forward: Callable, free: int
) -> None:
    graph = traced(forward, (X,), write=linear(4, 6), key=linear(4, 6))
    claims = search(graph).claims
    assert sum(c.dof for c in claims) == free
    for claim in claims:
        assert_flat(graph, claim, (X,))


def test_an_infinite_factor_ends_the_proof(traced: Callable) -> None:
    graph = traced(lambda m, x: m.read(m.write(x) * INFINITE), (X,), write=linear(4, 6), read=linear(6, 3))
    blocked = next(s.turned.blocked for s in spaces(Prover(graph)) if s.seed.op == "linear")
    assert blocked is not None and "no finite number" in blocked.why
