"""What a shift of a bias, a weight or a table does: dead, taken over by others, or live (DW001 to DW006).

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

from .parts import T, X, Y, linear, ln, matrix, numbers, rms, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


VECTORS: dict[str, Case] = {
    "unused int": (
        lambda m, x: tanh(x),
        {"a": nn.Parameter(torch.arange(3), requires_grad=False), "b": numbers(2)},
        {"DW001 b": 2},
        0,
    ),
    "unused empty": (lambda m, x: tanh(x), {"a": torch.zeros(0, 3), "b": numbers(2)}, {"DW001 b": 2}, 0),
    "key bias": (
        lambda m, x: softmax(m.q(x) @ m.k(x).mT, -1) @ x,
        {"q": linear(), "k": linear()},
        {"DW002 k.bias": 4, "DW009 k.weight": 16},
        0,
    ),
    "value no out bias": (
        lambda m, x: tanh(F.linear(softmax(x @ x.mT, -1) @ m.v(x), m.o)),
        {"v": linear(), "o": numbers(4, 4)},
        {"DW010 v.weight": 16},
        0,
    ),
    "value bias + ln": (
        lambda m, x: tanh(m.o(softmax(x @ x.mT, -1) @ (ln(x) * m.g + m.b))),
        {"o": linear(), "g": numbers(4), "b": numbers(4)},
        {"DW006 b": 4, "DW006 g": 4},
        4,
    ),
    "query over queries": (
        lambda m, x: softmax(m.q(x) @ m.k(x).mT, -2) @ x,
        {"q": linear(), "k": linear()},
        {"DW002 q.bias": 4, "DW009 k.weight": 16},
        0,
    ),
    "key bias absorbed": (
        lambda m, x: tanh(m.q(x) @ m.k(x).mT + m.b),
        {"q": matrix(4, 4), "k": linear(), "b": numbers(5, 5)},
        {"DW009 k.weight": 16},
        0,
    ),
    "key bias softmax absorbed": (
        lambda m, x: softmax((x.sum(0, keepdim=True) * 0 + 1) @ (x * 0 + m.k).mT + m.b, -1) @ x,
        {"k": numbers(4), "b": numbers(1)},
        {"DW002 k": 4, "DW018 b": 1},
        0,
    ),
    "centred weight": (
        lambda m, x: tanh(F.linear(x, m.w - m.w.mean(1, keepdim=True))),
        {"w": numbers(3, 4)},
        {"DW004 w": 3},
        0,
    ),
    "centred weight cols": (
        lambda m, x: tanh(F.linear(x, m.w - m.w.mean(0, keepdim=True))),
        {"w": numbers(3, 4)},
        {"DW004 w": 4},
        0,
    ),
    "standardised weight": (
        lambda m, x: tanh(F.linear(x, ln(m.w))),
        {"w": numbers(3, 4)},
        {"DW004 w": 3, "DW014 w": 3},
        0,
    ),
    "weight less other": (lambda m, x: tanh(F.linear(x, m.w - m.u)), {"w": numbers(3, 4), "u": numbers(3, 4)}, {}, 12),
    "weight less other mean": (
        lambda m, x: tanh(F.linear(x, m.w - m.u.mean())),
        {"w": numbers(3, 4), "u": numbers(3, 4)},
        {},
        12,
    ),
    "weight softmax": (lambda m, x: tanh(F.linear(x, softmax(m.w, -1))), {"w": numbers(3, 4)}, {}, 3),
    "weight normed": (lambda m, x: tanh(F.linear(x, rms(m.w))), {"w": numbers(3, 4)}, {"DW014 w": 3}, 0),
    "weight norm all": (lambda m, x: tanh(F.linear(x, m.w / m.w.norm())), {"w": numbers(3, 4)}, {"DW014 w": 1}, 0),
    "weight unit rows": (
        lambda m, x: tanh(F.linear(x, F.normalize(m.w, dim=1, eps=0.0))),
        {"w": numbers(3, 4)},
        {"DW014 w": 3},
        0,
    ),
    "weight unit eps": (
        lambda m, x: tanh(F.linear(x, F.normalize(m.w, dim=1))),
        {"w": numbers(3, 4)},
        {"DW014 w": 3},
        0,
    ),
    "weight unit cols": (lambda m, x: tanh(F.linear(x, F.normalize(m.w, dim=0, eps=0.0))), {"w": numbers(3, 4)}, {}, 4),
    "weight normed and read": (lambda m, x: tanh(F.linear(x, rms(m.w))) + m.w.sum(), {"w": numbers(3, 4)}, {}, 2),
    "weight normed and used": (
        lambda m, x: tanh(F.linear(x, rms(m.w))) + tanh(F.linear(sin(x), m.w)),
        {"w": numbers(3, 4)},
        {},
        0,
    ),
    "vector unit": (lambda m, x: tanh(x * F.normalize(m.w, dim=0, eps=0.0)), {"w": numbers(4)}, {"DW014 w": 1}, 0),
    "weight (1,4) unit": (
        lambda m, x: tanh(F.linear(x, F.normalize(m.w, dim=1, eps=0.0))),
        {"w": numbers(1, 4)},
        {"DW014 w": 1},
        0,
    ),
    "ln bias": (
        lambda m, x: ln(m.a(x)),
        {"a": linear()},
        {"DW005 a.weight": 4, "DW005 a.bias": 1, "DW014 a.weight": 1},
        0,
    ),
    "ln bias rms": (lambda m, x: rms(m.a(x)), {"a": linear()}, {"DW014 a.weight": 1}, 0),
    "ln heads": (
        lambda m, x: ln(m.a(x).unflatten(-1, (2, 3))),
        {"a": linear(4, 6)},
        {"DW005 a.weight": 8, "DW005 a.bias": 2, "DW014 a.weight": 2},
        0,
    ),
    "ln heads order": (
        lambda m, x: ln(m.a(x).unflatten(-1, (3, 2)).transpose(-1, -2)),
        {"a": linear(4, 6)},
        {"DW005 a.weight": 8, "DW005 a.bias": 2, "DW014 a.weight": 2},
        0,
    ),
    "ln part of it": (
        lambda m, x: torch.cat([ln((h := m.a(x))[..., :3]), tanh(h[..., 3:])], -1),
        {"a": linear(4, 6)},
        {"DW005 a.weight[0:3]": 4, "DW005 a.bias[0:3]": 1},
        1,
    ),
    "ln overlapping": (
        lambda m, x: torch.cat([ln((h := m.a(x))[..., :3]), ln(h[..., 2:])], -1),
        {"a": linear(4, 5)},
        {"DW005 a.weight": 4, "DW005 a.bias": 1, "DW014 a.weight": 1},
        1,
    ),
    "ln matrix param heads": (lambda m, x: ln(x + m.p.reshape(4)), {"p": numbers(2, 2)}, {"DW005 p": 1}, 0),
    "ln one channel": (lambda m, x: ln(torch.cat([m.a(x), x], -1)), {"a": linear(4, 1)}, {}, 0),
    "ln absorbed": (lambda m, x: ln(m.a(x) + m.b) + tanh(m.a(x)), {"a": linear(), "b": numbers(4)}, {"DW005 b": 1}, 0),
    "ln and stream": (
        lambda m, x: ln(h := (m.a(x) + m.b(sin(x)))) + tanh(h),
        {"a": linear(), "b": linear()},
        {"DW017 a.bias": 4},
        0,
    ),
    "ln and direct": (
        lambda m, x: (ln(h := (m.a(x) + m.b(sin(x)))), h),
        {"a": linear(), "b": linear()},
        {"DW017 a.bias": 4},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), VECTORS.values(), ids=list(VECTORS))
def test_what_becomes_of_a_shift(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


CHANNELS: dict[str, Case] = {
    "gn": (lambda m, y: F.group_norm(m.c(y), 2, eps=0.0), {"c": nn.Conv1d(4, 6, 1)}, {"DW004 c.bias": 2}, 2),
    "gn affine": (
        lambda m, y: m.n(m.c(y)),
        {"c": nn.Conv1d(4, 6, 1), "n": nn.GroupNorm(3, 6, eps=0.0)},
        {"DW004 c.bias": 3},
        3,
    ),
    "gn one group each": (
        lambda m, y: F.group_norm(m.c(y), 6, eps=0.0),
        {"c": nn.Conv1d(4, 6, 1)},
        {"DW004 c.bias": 6},
        6,
    ),
    "gn and tanh": (lambda m, y: F.group_norm((h := m.c(y)), 2, eps=0.0) + tanh(h), {"c": nn.Conv1d(4, 6, 1)}, {}, 0),
    "gn part": (lambda m, y: F.group_norm(torch.cat([m.c(y), y], 1), 2, eps=0.0), {"c": nn.Conv1d(4, 2, 1)}, {}, 0),
    "gn shuffled": (
        lambda m, y: F.group_norm(m.c(y)[:, torch.tensor([0, 2, 4, 1, 3, 5])], 2, eps=0.0),
        {"c": nn.Conv1d(4, 6, 1)},
        {},
        4,
    ),
    "gn then bias": (
        lambda m, y: F.group_norm(m.c(y) + m.b, 2, eps=0.0),
        {"c": nn.Conv1d(4, 6, 1), "b": numbers(6, 1)},
        {"DW004 b": 2, "DW004 c.bias": 2},
        6,
    ),
    "in": (lambda m, y: F.instance_norm(m.c(y), eps=1e-12), {"c": nn.Conv1d(4, 6, 1)}, {"DW004 c.bias": 6}, 6),
    "bn eval": (
        lambda m, y: tanh(m.n(m.c(y))),
        {"c": nn.Conv1d(4, 6, 1), "n": nn.BatchNorm1d(6)},
        {"DW004 c.bias": 6, "DW004 n.weight": 6},
        0,
    ),
    "sub buffer by hand": (
        lambda m, y: tanh(m.c(y) - m.n.running_mean.reshape(1, -1, 1) + m.b),
        {"c": nn.Conv1d(4, 6, 1), "n": nn.BatchNorm1d(6), "b": numbers(6, 1)},
        {"DW001 n.weight": 6, "DW001 n.bias": 6, "DW004 c.bias": 6},
        0,
    ),
    "sub param by hand": (
        lambda m, y: tanh(m.c(y) - m.u.reshape(1, -1, 1) + m.b),
        {"c": nn.Conv1d(4, 6, 1), "u": numbers(6), "b": numbers(6, 1)},
        {"DW017 u": 6, "DW017 c.bias": 6},
        0,
    ),
    "sub number": (
        lambda m, y: tanh(m.c(y) - 2 + m.b),
        {"c": nn.Conv1d(4, 6, 1), "b": numbers(6, 1)},
        {"DW017 c.bias": 6},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CHANNELS.values(), ids=list(CHANNELS))
def test_what_becomes_of_a_shift_before_channel_statistics(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Y, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


TABLES: dict[str, Case] = {
    "ln stream table": (
        lambda m, t: ln(m.e(t) + m.p(t.flip(1))),
        {"e": table(7, 4), "p": table(7, 4)},
        {"DW005 e.weight": 7, "DW005 p.weight": 7, "DW013 e.weight": 3, "DW014 e.weight": 1},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_what_becomes_of_a_shift_of_tables(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
