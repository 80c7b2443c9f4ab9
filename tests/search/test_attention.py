"""Queries against keys (DW002, DW009), and values against what reads them (DW003, DW010).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, sin, softmax, tanh

from .parts import X, att, linear, matrix, numbers, rms

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


SCORES: dict[str, Case] = {
    "plain": (lambda m, x: att(m.q(x), m.k(x), x), {"q": matrix(4, 4), "k": matrix(4, 4)}, {"DW009 k.weight": 16}, 0),
    "heads": (
        lambda m, x: att(hd(m.q(x)), hd(m.k(x)), hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 8},
        0,
    ),
    "grouped": (
        lambda m, x: att(hd(m.q(x)), m.k(x)[:, None], hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {"DW009 k.weight": 4},
        0,
    ),
    "grouped expand": (
        lambda m, x: att(hd(m.q(x)), m.k(x)[:, None].expand(-1, 2, -1, -1), hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {"DW009 k.weight": 4},
        0,
    ),
    "one head differs": (
        lambda m, x: att(hd(m.q(x)), hd(m.k(x)).flip(1), hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 8},
        0,
    ),
    "head scale": (
        lambda m, x: att(hd(m.q(x)) * torch.tensor([1.0, 2.0]).reshape(2, 1, 1), hd(m.k(x)), hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 8},
        0,
    ),
    "channel scale": (
        lambda m, x: att(m.q(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]), m.k(x), x),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 4},
        12,
    ),
    "roll grouped": (
        lambda m, x: att(torch.stack([m.q(x)[..., :2], m.q(x)[..., 2:].roll(1, -1)], 1), m.k(x)[:, None], hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {},
        4,
    ),
    "grouped other map": (
        lambda m, x: att(
            torch.stack([m.q(x)[..., :2], m.q(x)[..., 2:] * torch.tensor([1.0, 3.0])], 1), m.k(x)[:, None], hd(x)
        ),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {},
        4,
    ),
    "q used by two keys": (
        lambda m, x: att(m.q(x), m.k(x), x) + att(m.q(x), m.j(x), sin(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4), "j": matrix(4, 4)},
        {},
        16,
    ),
    "q part reaches": (
        lambda m, x: att(m.q(x)[..., :2], m.k(x), x),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {"DW001 q.weight[2:4]": 8, "DW009 k.weight": 4},
        0,
    ),
    "q rest read": (
        lambda m, x: att((h := m.q(x))[..., :2], m.k(x), x) + h[..., 2:].mean(-1, keepdim=True),
        {"q": matrix(4, 4), "k": matrix(4, 2)},
        {"DW009 k.weight": 4},
        4,
    ),
    "fused": (
        lambda m, x: att((h := m.q(x))[..., :2], h[..., 2:], x),
        {"q": matrix(4, 4)},
        {"DW009 q.weight[2:4]": 4},
        0,
    ),
    "qk overlapping": (lambda m, x: att((h := m.q(x))[..., :3], h[..., 1:], x), {"q": matrix(4, 4)}, {}, 2),
    "k also value": (lambda m, x: att(m.q(x), (h := m.k(x)), h), {"q": matrix(4, 4), "k": matrix(4, 4)}, {}, 0),
    "k also value out": (
        lambda m, x: m.o(att(m.q(x), (h := m.k(x)), h)),
        {"q": matrix(4, 4), "k": matrix(4, 4), "o": matrix(4, 4)},
        {},
        16,
    ),
    "k rms": (
        lambda m, x: att(m.q(x), rms(m.k(x)), x),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 6, "DW014 k.weight": 1},
        0,
    ),
    "both rms": (
        lambda m, x: att(rms(m.q(x)), rms(m.k(x)), x),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 6, "DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "both rms gains": (
        lambda m, x: att(rms(m.q(x)) * m.g, rms(m.k(x)) * m.h, x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4)},
        {"DW009 h": 4, "DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "both rms one gain": (
        lambda m, x: att(rms(m.q(x)) * m.g, rms(m.k(x)), x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "both rms one gain twice": (
        lambda m, x: att(rms(m.q(x)) * m.g, rms(m.k(x)) * m.g, x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "gains heads": (
        lambda m, x: att(rms(hd(m.q(x))) * m.g, rms(hd(m.k(x))) * m.h, hd(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(2), "h": numbers(2)},
        {"DW009 h": 2, "DW014 q.weight": 2, "DW014 k.weight": 2},
        0,
    ),
    "gains read": (
        lambda m, x: att(rms(m.q(x)) * m.g, rms(m.k(x)) * m.h, x) + m.g,
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "gain and projection": (lambda m, x: att(rms(x) * m.g, m.k(x), x), {"k": matrix(4, 4), "g": numbers(4)}, {}, 4),
    "gains sums": (
        lambda m, x: att(rms(m.q(x)) * m.g + rms(sin(x)) * m.u, rms(m.k(x)) * m.h, x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4), "u": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        4,
    ),
    "gains x x": (
        lambda m, x: att(rms(x) * m.g, rms(sin(x)) * m.h, x),
        {"g": numbers(4), "h": numbers(4)},
        {"DW009 h": 4},
        0,
    ),
    "gain of tanh": (lambda m, x: att(tanh(x) * m.g, tanh(x) * m.h, x), {"g": numbers(4), "h": numbers(4)}, {}, 4),
    "sum of projections": (
        lambda m, x: att(m.q(x) + m.j(sin(x)), m.k(x), x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "j": matrix(4, 4)},
        {},
        16,
    ),
    "sum with data": (lambda m, x: att(m.q(x) + sin(x), m.k(x), x), {"q": matrix(4, 4), "k": matrix(4, 4)}, {}, 0),
    "tanh query": (lambda m, x: att(tanh(m.q(x)), m.k(x), x), {"q": matrix(4, 4), "k": matrix(4, 4)}, {}, 0),
    "q times data": (
        lambda m, x: att(m.q(x) * x, m.k(x), x),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 4},
        0,
    ),
    "weight elsewhere": (
        lambda m, x: att(m.q(x), m.k(x), x) + m.k.weight.sum(),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        15,
    ),
    "weight elsewhere lin": (
        lambda m, x: att(m.q(x), m.k(x), x) + m.k(sin(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        0,
    ),
    "weight T too": (
        lambda m, x: att(m.q(x), m.k(x), x) + F.linear(x, m.k.weight.T),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        0,
    ),
    "matmul constant": (
        lambda m, x: att(m.q(x), m.k(x), x) @ torch.eye(4),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 16},
        0,
    ),
    "self product": (lambda m, x: softmax((q := m.q(x)) @ q.mT, -1) @ x, {"q": matrix(4, 4)}, {}, 6),
    "product twice": (
        lambda m, x: att((q := m.q(x)), (k := m.k(x)), x) + tanh(q @ k.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 16},
        0,
    ),
    "product other order": (
        lambda m, x: att((q := m.q(x)), (k := m.k(x)), x) + tanh(k @ q.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight": 16},
        0,
    ),
    "product and q sum": (
        lambda m, x: att((q := m.q(x)), m.k(x), x) + q.sum(-1, keepdim=True),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        12,
    ),
    "biases": (
        lambda m, x: att(m.q(x), m.k(x), x),
        {"q": linear(), "k": linear()},
        {"DW002 k.bias": 4, "DW009 k.weight": 16},
        0,
    ),
    "rows of different": (
        lambda m, x: att(m.q(x)[..., :1], m.k(x)[..., :1], x) + att(m.q(x)[..., 1:], m.k(x)[..., 1:], sin(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight[0:1]": 1, "DW009 k.weight[1:4]": 9},
        0,
    ),
    "three heads 2 sizes": (
        lambda m, x: att(m.q(x)[..., :3], m.k(x)[..., :3], x) + att(m.q(x)[..., 3:], m.k(x)[..., 3:], sin(x)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW009 k.weight[0:3]": 9, "DW009 k.weight[3:4]": 1},
        0,
    ),
    "shared part": (
        lambda m, x: softmax(m.q(x)[..., :2] @ m.k(x)[..., :2].mT + m.q(x)[..., 2:] @ m.k(x)[..., :2].mT, -1) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {"DW001 k.weight[2:4]": 8},
        12,
    ),
    "wide heads": (
        lambda m, x: att(m.q(x), m.k(x), x),
        {"q": matrix(4, 6), "k": matrix(4, 6)},
        {"DW009 k.weight": 32},
        0,
    ),
    "narrow inputs": (
        lambda m, x: att(m.q(x[..., :1]), m.k(x[..., :1]), x),
        {"q": matrix(1, 3), "k": matrix(1, 3)},
        {"DW009 k.weight": 5},
        0,
    ),
    "gain normed again": (
        lambda m, x: att(rms(rms(m.q(x)) * m.g), rms(m.k(x)) * m.h, x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4)},
        {"DW014 q.weight": 1, "DW014 g": 1, "DW014 k.weight": 1},
        3,
    ),
    "product and ReLU": (
        lambda m, x: att((q := m.q(x)), (k := m.k(x)), x) + tanh(torch.relu(q) @ k.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        4,
    ),
    "one of two projections arrives": (
        lambda m, x: att(torch.cat([m.q(x), m.j(sin(x))], -1)[..., 4:], m.k(x), x),
        {"q": matrix(4, 4), "k": matrix(4, 4), "j": matrix(4, 4)},
        {},  # as many channels are kept as there are tokens, less one
        32,
    ),
    "self product read": (
        lambda m, x: softmax((q := m.q(x)) @ q.mT, -1) @ m.r(q),
        {"q": matrix(4, 4), "r": matrix(4, 4)},
        {},
        6,
    ),
    "k meets itself": (
        lambda m, x: att(m.q(x), (k := m.k(x)), x) + tanh(k @ k.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        6,
    ),
    "gained k meets itself": (
        lambda m, x: att(rms(m.q(x)) * m.g, (k := rms(m.k(x)) * m.h), x) + tanh(k @ k.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "gained q meets itself": (
        lambda m, x: att((q := rms(m.q(x)) * m.g), rms(m.k(x)) * m.h, x) + tanh(q @ q.mT) @ x,
        {"q": matrix(4, 4), "k": matrix(4, 4), "g": numbers(4), "h": numbers(4)},
        {"DW014 q.weight": 1, "DW014 k.weight": 1},
        0,
    ),
    "queries of two heads are one": (
        lambda m, x: att(m.q(x)[:, None], torch.stack([m.k(x), m.j(sin(x))], 1), x[:, None]),
        {"q": matrix(4, 4), "k": matrix(4, 4), "j": matrix(4, 4)},
        {},
        16,
    ),
    "queries of two heads are one, keys repeat": (
        lambda m, x: att(m.q(x)[:, None], torch.stack([m.k(x), torch.cat([h := m.j(sin(x)), h], -1)], 1), x[:, None]),
        {"q": matrix(4, 4), "k": matrix(4, 4), "j": matrix(4, 2)},
        {},
        12,
    ),
    "learned key beside the keys": (
        lambda m, x: att(m.q(x), torch.cat([m.k(x), m.z.expand(2, 1, 4)], 1), torch.cat([x, x[:, :1]], 1)),
        {"q": matrix(4, 4), "k": matrix(4, 4), "z": numbers(1, 1, 4)},
        {"DW009 k.weight": 16},
        0,
    ),
    "constant key beside the keys": (
        lambda m, x: att(m.q(x), torch.cat([m.k(x), torch.ones(2, 1, 4)], 1), torch.cat([x, x[:, :1]], 1)),
        {"q": matrix(4, 4), "k": matrix(4, 4)},
        {},
        12,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), SCORES.values(), ids=list(SCORES))
def test_queries_and_keys_share_a_basis_that_nothing_else_sees(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


VALUES: dict[str, Case] = {
    "plain": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
    "bias": (lambda m, x: tanh(m.o(att(x, x, m.v(x)))), {"v": linear(), "o": matrix(4, 3)}, {"DW010 v.weight": 16}, 1),
    "biases": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))),
        {"v": linear(), "o": linear(4, 3)},
        {"DW003 v.bias": 4, "DW010 v.weight": 16},
        0,
    ),
    "heads": (
        lambda m, x: tanh(m.o(att(hd(x), hd(x), hd(m.v(x))).transpose(1, 2).flatten(2))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 8},
        0,
    ),
    "heads biases": (
        lambda m, x: tanh(m.o(att(hd(x), hd(x), hd(m.v(x))).transpose(1, 2).flatten(2))),
        {"v": linear(), "o": linear(4, 3)},
        {"DW003 v.bias": 4, "DW010 v.weight": 8},
        0,
    ),
    "two writers": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x) + m.u(sin(x))))),
        {"v": matrix(4, 4), "o": matrix(4, 3), "u": matrix(4, 4)},
        {"DW019 v.weight": 16},
        4,
    ),
    "two matmuls": (
        lambda m, x: tanh(m.o(att(x, x, att(x, x, m.v(x))))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
    "residual": (
        lambda m, x: tanh(m.o(att(x, x, (h := m.v(x))) + h)),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
    "wide": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))),
        {"v": matrix(4, 6), "o": matrix(6, 3)},
        {"DW010 v.weight": 30},
        0,
    ),
    "wide bias": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))),
        {"v": linear(4, 6), "o": linear(6, 3)},
        {"DW003 v.bias": 6, "DW010 v.weight": 30},
        0,
    ),
    "gated": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)) * torch.sigmoid(m.u(x)))),
        {"v": matrix(4, 4), "o": matrix(4, 3), "u": matrix(4, 4)},
        {"DW010 v.weight": 4},
        0,
    ),
    "normed": (
        lambda m, x: tanh(m.o(rms(att(x, x, m.v(x))))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 6},
        1,
    ),
    "normed gain": (
        lambda m, x: tanh(m.o(rms(att(x, x, m.v(x))) * m.g)),
        {"v": matrix(4, 4), "o": matrix(4, 3), "g": numbers(4)},
        {"DW006 g": 4, "DW010 v.weight": 6},
        1,
    ),
    "relu": (
        lambda m, x: tanh(m.o(torch.relu(att(x, x, m.v(x))))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 4},
        0,
    ),
    "one reader slice": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x))[..., :3])),
        {"v": matrix(4, 4), "o": matrix(3, 3)},
        {"DW001 v.weight[3:4]": 4, "DW010 v.weight": 9},
        0,
    ),
    "two readers": (
        lambda m, x: tanh(m.o(h := att(x, x, m.v(x)))) + sin(m.u(h)),
        {"v": matrix(4, 4), "o": matrix(4, 3), "u": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
    "reader twice": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))) + sin(m.o(att(sin(x), x, m.v(x)))),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
    "reader different": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))) + sin(m.o(x)),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {},
        4,
    ),
    "sigmoid": (
        lambda m, x: tanh(m.o(torch.sigmoid(x @ x.mT) @ m.v(x))),
        {"v": linear(), "o": linear(4, 3)},
        {"DW010 v.weight": 16},
        1,
    ),
    "value is data side": (
        lambda m, x: tanh(m.o((m.v(x).mT @ x).mT)),
        {"v": matrix(4, 4), "o": matrix(4, 3)},
        {"DW010 v.weight": 16},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), VALUES.values(), ids=list(VALUES))
def test_values_share_a_basis_with_what_reads_the_heads(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


def test_a_claim_about_gains_says_so(census: Callable) -> None:
    gained = census(SCORES["both rms gains"][0], X, **SCORES["both rms gains"][1]).claims
    plain = census(SCORES["plain"][0], X, **SCORES["plain"][1]).claims
    assert [c.note for c in gained + plain if c.code == "DW009"] == ["of the two gains only the product counts", ""]
