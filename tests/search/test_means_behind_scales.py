"""Means behind a factor per channel (DW005), weights that read one norm twice (DW008), scales of rows (DW014).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, sin, softmax, tanh

from .parts import T, X, Y, linear, ln, numbers, rms, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


CASES: dict[str, Case] = {
    "scale weight": (
        lambda m, x: ln(x + F.linear(x, m.w) * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {"DW005 w": 4, "DW011 g": 4},
        1,
    ),
    "scale data": (
        lambda m, x: ln(x[:, :4] + F.linear(m.w, m.u) * m.g),
        {"w": numbers(4, 4), "u": numbers(4, 4), "g": numbers(4)},
        {},
        24,
    ),
    "scale data through": (
        lambda m, x: ln(x + F.linear(m.b + sin(x), m.u) * m.g),
        {"b": numbers(4), "u": numbers(4, 4), "g": numbers(4)},
        {"DW005 u": 4, "DW011 g": 4},
        1,
    ),
    "scale second map": (
        lambda m, x: ln(x + F.linear(F.linear(x, m.w), m.u) * m.g),
        {"w": numbers(4, 4), "u": numbers(4, 4), "g": numbers(4)},
        {"DW005 u": 4, "DW011 g": 4, "DW019 w": 16},
        1,
    ),
    "scale transposed result": (
        lambda m, x: ln(x[:, :4] + F.linear(x[0, :4], m.w).t() * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {},
        1,
    ),
    "scale reshaped": (
        lambda m, x: ln(x[:, :4] + F.linear(x[:, :2, :], m.w).reshape(2, 4, 4) * m.g),
        {"w": numbers(8, 4), "g": numbers(4)},
        {"DW011 g": 4},
        8,
    ),
    "scale reshaped vector": (
        lambda m, x: ln(x + m.b.reshape(4, 4)[:, None].expand(4, 5, 4)[:2] * m.g),
        {"b": numbers(16), "g": numbers(4)},
        {},
        14,
    ),
    "scale times": (
        lambda m, x: ln(x + F.linear(x, m.w) * sin(x) * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {"DW011 g": 4},
        0,
    ),
    "scale added data": (
        lambda m, x: ln(x + (F.linear(x, m.w) + sin(x)) * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {},
        5,
    ),
    "scale bias one": (
        lambda m, x: ln(x + (F.linear(x, m.w) + m.b) * m.g),
        {"w": numbers(4, 4), "b": numbers(1), "g": numbers(4)},
        {"DW005 w": 4},
        3,
    ),
    "scale bias places": (
        lambda m, x: ln(x + (F.linear(x, m.w) + m.b) * m.g),
        {"w": numbers(4, 4), "b": numbers(5, 4), "g": numbers(4)},
        {"DW005 w": 4, "DW005 b": 5, "DW011 g": 4},
        1,
    ),
    "scale bias row": (
        lambda m, x: ln(x + (F.linear(x, m.w) + m.b) * m.g),
        {"w": numbers(4, 4), "b": numbers(1, 4), "g": numbers(4)},
        {"DW005 w": 4, "DW005 b": 1, "DW011 g": 4},
        1,
    ),
    "scale sub": (
        lambda m, x: ln(x + (m.b - F.linear(x, m.w)) * m.g),
        {"w": numbers(4, 4), "b": numbers(4), "g": numbers(4)},
        {"DW011 g": 4},
        6,
    ),
    "scale alpha": (
        lambda m, x: ln(x + torch.add(F.linear(x, m.w), m.b, alpha=2) * m.g),
        {"w": numbers(4, 4), "b": numbers(4), "g": numbers(4)},
        {"DW005 w": 4, "DW005 b": 1, "DW011 g": 4},
        1,
    ),
    "scale square T": (
        lambda m, x: ln(x + F.linear(x, m.w.T) * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {"DW011 g": 4},
        5,
    ),
    "scale softmax": (
        lambda m, x: softmax(x + F.linear(x, m.w) * m.g, -1),
        {"w": numbers(4, 4), "g": numbers(4)},
        {"DW011 g": 4},
        4,
    ),
    "scale matrix": (lambda m, x: ln(x + m.p * m.g), {"p": numbers(5, 4), "g": numbers(4)}, {}, 9),
    "scale matrix square": (lambda m, x: ln(x[:, :4] + m.p * m.g), {"p": numbers(4, 4), "g": numbers(4)}, {}, 8),
    "scale places": (
        lambda m, x: ln(x[:, :4] + F.linear(x[:, :4], m.w) * m.g),
        {"w": numbers(4, 4), "g": numbers(4, 1)},
        {"DW005 w": 4},
        2,
    ),
    "lost views": (
        lambda m, x: tanh(F.linear(ln(x), m.w)) + sin(F.linear(ln(x * x), m.w.T)),
        {"w": numbers(4, 4)},
        {},
        1,
    ),
    "lost views gain": (
        lambda m, x: tanh(F.linear(ln(x) * m.g, m.w)) + sin(F.linear(ln(x * x) * m.g, m.w.T)),
        {"w": numbers(4, 4), "g": numbers(4)},
        {},
        2,
    ),
    "lost gains differ": (
        lambda m, x: tanh(F.linear(ln(x) * m.g, m.w)) + sin(F.linear(ln(x * x) * m.h, m.w)),
        {"w": numbers(4, 4), "g": numbers(4), "h": numbers(4)},
        {},
        4,
    ),
    "q meets itself rolled": (
        lambda m, x: softmax((q := F.linear(x, m.w)) @ q.roll(1, -1).mT + q @ F.linear(x, m.k).mT, -1) @ x,
        {"w": numbers(4, 4), "k": numbers(4, 4)},
        {},
        16,
    ),
    "three way": (
        lambda m, x: (
            softmax(F.linear(x, m.q) @ F.linear(x, m.k).mT, -1) @ x
            + softmax(F.linear(x, m.k) @ F.linear(x, m.j).mT, -1) @ sin(x)
        ),
        {"q": numbers(4, 4), "k": numbers(4, 4), "j": numbers(4, 4)},
        {},
        16,
    ),
    "q read": (
        lambda m, x: softmax((q := F.linear(x, m.q)) @ F.linear(x, m.k).mT, -1) @ F.linear(q, m.j),
        {"q": numbers(4, 4), "k": numbers(4, 4), "j": numbers(4, 4)},
        {},
        16,
    ),
    "split heads q read": (
        lambda m, x: softmax((q := F.linear(x, m.q))[..., :2] @ F.linear(x, m.k).mT, -1) @ F.linear(q[..., :2], m.j),
        {"q": numbers(4, 4), "k": numbers(2, 4), "j": numbers(4, 2)},
        {"DW001 q[2:4]": 8},
        4,
    ),
    "fused heads, normed one by one": (
        lambda m, x: (
            tanh(m.c(ln((h := m.a(x).unflatten(-1, (2, 2, 3)))[..., 0, :, :]).flatten(-2)))
            + sin(m.d(ln(h[..., 1, :, :]).flatten(-2)))
        ),
        {"a": linear(4, 12), "c": linear(6, 2), "d": linear(6, 2)},
        {
            "DW005 a.weight[0:6]": 8,
            "DW005 a.weight[6:12]": 8,
            "DW005 a.bias[0:6]": 2,
            "DW005 a.bias[6:12]": 2,
            "DW014 a.weight": 4,
        },
        12,
    ),
    "heads, normed one by one and read as they are": (
        lambda m, x: tanh(m.c(ln(h := m.a(x).unflatten(-1, (2, 3))).flatten(-2))) + sin(m.d(sin(h).flatten(-2))),
        {"a": linear(4, 6), "c": linear(6, 2), "d": linear(6, 2)},
        {},
        2 * 2,  # every row of c reads two vectors that sum to zero
    ),
    "factor of two numbers": (
        lambda m, x: tanh(F.linear(x, m.w) * (m.s + m.u)),
        {"w": numbers(3, 4), "s": numbers(3), "u": numbers(3)},
        {"DW017 s": 3},
        3,
    ),
    "factor half reached": (
        lambda m, x: tanh(torch.cat([F.linear(x, m.w), x], -1) * m.s),
        {"w": numbers(3, 4), "s": numbers(7)},
        {},
        3,
    ),
    "scale softmax over places": (
        lambda m, x: ln(h := (F.linear(x, m.w) + m.b) * m.g) + softmax(h, 1),
        {"w": numbers(4, 4), "b": numbers(4), "g": numbers(4)},
        {"DW005 b": 1, "DW011 g": 4},
        0,
    ),
    "scale softmax over places, row": (
        lambda m, x: ln(h := (F.linear(x, m.w) + m.b) * m.g) + softmax(h, 1),
        {"w": numbers(4, 4), "b": numbers(1, 4), "g": numbers(4)},
        {"DW005 b": 1, "DW011 g": 4},
        0,
    ),
    "scale table behind a view": (
        lambda m, x: ln(x + (F.linear(x, m.w) + m.p.reshape(1, 5, 4)) * m.g),
        {"w": numbers(4, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW011 g": 4},
        10,
    ),
    "scale parameter as data": (
        lambda m, x: ln(x[:, :4] + (F.linear(m.p, m.w) + F.linear(x[:, :4], m.u)) * m.g),
        {"w": numbers(4, 4), "u": numbers(4, 4), "p": numbers(4, 4), "g": numbers(4)},
        {"DW005 w": 4, "DW005 u": 4, "DW011 g": 4},
        17,
    ),
    "scale flat and back": (
        lambda m, x: ln(x + F.linear(x, m.w).reshape(2, 20).reshape(2, 5, 4) * m.g),
        {"w": numbers(4, 4), "g": numbers(4)},
        {"DW011 g": 4},
        5,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_what_a_factor_per_channel_leaves(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


TABLES: dict[str, Case] = {
    "scale table": (
        lambda m, t: ln(m.e(t) * m.g + m.p),
        {"e": table(7, 4), "g": numbers(4), "p": numbers(5, 4)},
        {"DW005 p": 5, "DW013 e.weight": 4, "DW011 g": 4, "DW014 e.weight": 1},
        6,
    ),
    "rows: two biases table": (
        lambda m, t: rms(m.e(t) + m.b),
        {"e": table(7, 4), "b": numbers(4)},
        {"DW017 b": 4, "DW014 e.weight": 1},
        6,
    ),
    "rows: sum of two": (lambda m, t: rms(m.e(t) + m.e(t.flip(1))), {"e": table(7, 4)}, {"DW014 e.weight": 1}, 0),
    "rows: product of two": (lambda m, t: rms(m.e(t) * m.e(t.flip(1))), {"e": table(7, 4)}, {}, 7),
    "rows: matmul": (
        lambda m, t: rms(m.e(t) @ m.w),
        {"e": table(7, 4), "w": numbers(4, 4)},
        {"DW019 e.weight": 16, "DW014 w": 1},
        6,
    ),
    "rows: times learned": (
        lambda m, t: rms(m.e(t) * m.w),
        {"e": table(7, 4), "w": numbers(4)},
        {"DW011 w": 4, "DW014 e.weight": 1},
        6,
    ),
    "rows: times data": (lambda m, t: rms(m.e(t) * m.e(t).mean(-1, keepdim=True)), {"e": table(7, 4)}, {}, 7),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_what_a_norm_leaves_of_the_rows_of_a_table(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


CHANNELS: dict[str, Case] = {
    "rows: conv heads": (
        lambda m, y: rms(m.c(y).mT.unflatten(-1, (2, 2))),
        {"c": nn.Conv1d(4, 4, 1)},
        {"DW014 c.weight": 1},
        1,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CHANNELS.values(), ids=list(CHANNELS))
def test_what_a_norm_leaves_of_the_heads_of_a_convolution(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Y, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
