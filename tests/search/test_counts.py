"""How many dimensions a gauge makes redundant: those of its group, less what moves nothing or is claimed elsewhere.

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, relu, sin, softmax, tanh

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

from .conftest import Odd
from .parts import T, X, Y, att, linear, ln, matrix, numbers, rms, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


def with_signs(h: Tensor) -> Tensor:
    """The same, by two ways: three channels change their sign twice."""
    return torch.cat([h[..., :3].neg().neg(), h[..., 3:]], -1)


CASES: dict[str, Case] = {
    "chain": (lambda m, x: tanh(m.b(m.a(x))), {"a": matrix(4, 3), "b": matrix(3, 4)}, {"DW019 a.weight": 9}, 0),
    "chain wide": (lambda m, x: tanh(m.b(m.a(x))), {"a": matrix(4, 7), "b": matrix(7, 4)}, {"DW019 a.weight": 40}, 0),
    "chain wide bias": (
        lambda m, x: tanh(m.b(m.a(x))),
        {"a": linear(4, 7), "b": linear(7, 4)},
        {"DW017 a.bias": 7, "DW019 a.weight": 40},
        0,
    ),
    "chain wide, the bias in two claims": (
        lambda m, x: tanh(m.c(att(x, x, with_signs(m.a(x[..., :2]) + m.b(sin(x[..., 2:])))))),
        {"a": linear(2, 7), "b": matrix(2, 7), "c": linear(7, 2)},
        {"DW003 a.bias[0:3]": 3, "DW003 a.bias[3:7]": 4, "DW019 a.weight": 49 - (7 - 4) * (7 - 2)},
        0,
    ),
    "one map for two chains": (
        lambda m, x: tanh(m.b((h := m.a(x))[..., :3])) + sin(m.c(h[..., 3:])),
        {"a": matrix(4, 6), "b": matrix(3, 4), "c": matrix(3, 4)},
        {"DW019 a.weight[0:3]": 9, "DW019 a.weight[3:6]": 9},
        0,
    ),
    "a part of a sum": (
        lambda m, x: tanh(m.c((2.0 * m.a(x) + m.b(sin(x)))[..., :3])),
        {"a": matrix(4, 6), "b": matrix(4, 6), "c": matrix(3, 4)},
        {"DW001 a.weight[3:6]": 12, "DW001 b.weight[3:6]": 12, "DW019 a.weight": 9},
        0,
    ),
    "a part of a sum with a bias": (
        lambda m, x: tanh(m.c((2.0 * m.a(x) + m.b(sin(x)))[..., :3])),
        {"a": linear(4, 6), "b": matrix(4, 6), "c": matrix(3, 4)},
        {"DW001 a.weight[3:6]": 12, "DW001 b.weight[3:6]": 12, "DW001 a.bias[3:6]": 3, "DW019 a.weight": 9},
        0,
    ),
    "a scale that passes a gain": (
        lambda m, x: tanh(m.c(rms(h := m.a(x)))) + sin(m.d(rms(h * m.g + m.b(sin(x))))),
        {"a": matrix(4, 3), "b": matrix(4, 3), "g": numbers(3), "c": matrix(3, 2), "d": matrix(3, 2)},
        {"DW014 a.weight": 1},
        1,  # the scale of the second sum, by the gain and by b
    ),
    "chain three": (
        lambda m, x: tanh(m.c(m.b(m.a(x)))),
        {"a": matrix(4, 3), "b": matrix(3, 3), "c": matrix(3, 4)},
        {"DW019 a.weight": 9, "DW019 b.weight": 9},
        0,
    ),
    "chain four wide": (
        lambda m, x: tanh(m.d(m.c(m.b(m.a(x))))),
        {"a": matrix(4, 6), "b": matrix(6, 5), "c": matrix(5, 6), "d": matrix(6, 2)},
        {"DW019 a.weight": 28, "DW019 b.weight": 24, "DW019 c.weight": 36},
        0,
    ),
    "chain same twice": (
        lambda m, x: tanh(m.c(m.b(m.b(m.a(x))))),
        {"a": matrix(4, 3), "b": matrix(3, 3), "c": matrix(3, 4)},
        {},
        18,
    ),
    "chain same twice wide": (
        lambda m, x: tanh(m.c(m.b(m.b(m.a(x))))),
        {"a": matrix(4, 6), "b": matrix(6, 6), "c": matrix(6, 2)},
        {},
        64,
    ),
    "chain skip": (
        lambda m, x: tanh(m.c((h := m.a(x)) + m.b(h))),
        {"a": matrix(4, 3), "b": matrix(3, 3), "c": matrix(3, 4)},
        {"DW019 a.weight": 9},
        9,
    ),
    "chain rms wide": (
        lambda m, x: tanh(m.c(rms(m.a(x)))),
        {"a": matrix(4, 7), "c": matrix(7, 2)},
        {"DW012 a.weight": 21, "DW014 a.weight": 1},
        3,
    ),
    "chain rms wide2": (
        lambda m, x: tanh(m.c(rms((h := m.a(x)) + m.b(rms(h))))),
        {"a": matrix(4, 7), "b": matrix(7, 7), "c": matrix(7, 2)},
        {"DW012 a.weight": 21, "DW014 a.weight": 1},
        24,
    ),
    "rms chain rms": (
        lambda m, x: tanh(m.c(rms(m.b(rms(m.a(x)))))),
        {"a": matrix(2 + 2, 6), "b": matrix(6, 6), "c": matrix(6, 2)},
        {"DW012 a.weight": 15, "DW012 b.weight": 15, "DW014 a.weight": 1, "DW014 b.weight": 1},
        23,
    ),
    "heads wide": (
        lambda m, x: att(hd(m.q(x[..., :1])), hd(m.k(x[..., :1])), hd(x)),
        {"q": matrix(1, 4), "k": matrix(1, 4)},
        {"DW009 k.weight": 6},
        0,
    ),
    "qk and vo one weight": (
        lambda m, x: tanh(m.o(att(m.q(x), m.k(h := m.a(x)), m.v(h)))),
        {"a": matrix(4, 3), "q": matrix(4, 2), "k": matrix(3, 2), "v": matrix(3, 2), "o": matrix(2, 3)},
        {"DW009 k.weight": 4, "DW010 v.weight": 4, "DW019 a.weight": 9},
        0,
    ),
    "qk wide in space": (
        lambda m, x: tanh(m.o(att(m.q(x), m.k(h := m.a(x)), m.v(h)))),
        {"a": matrix(4, 6), "q": matrix(4, 2), "k": matrix(6, 2), "v": matrix(6, 2), "o": matrix(2, 3)},
        {"DW009 k.weight": 4, "DW010 v.weight": 4, "DW019 a.weight": 32},
        0,
    ),
    "v wide in space": (
        lambda m, x: tanh(m.o(att(x, x, m.v(m.a(x))))),
        {"a": matrix(4, 6), "v": matrix(6, 5), "o": matrix(5, 3)},
        {"DW010 v.weight": 23, "DW019 a.weight": 34},
        0,
    ),
    "bias taken": (
        lambda m, x: tanh(m.o(att(x, x, m.v(x)))),
        {"v": linear(4, 6), "o": linear(6, 2)},
        {"DW003 v.bias": 6, "DW010 v.weight": 28},
        0,
    ),
    "chain bias taken": (
        lambda m, x: tanh(m.b(m.a(x))),
        {"a": linear(2 + 2, 6), "b": linear(6, 2)},
        {"DW017 a.bias": 6, "DW019 a.weight": 28},
        0,
    ),
    "chain bias not taken": (
        lambda m, x: tanh(m.b(m.a(x))),
        {"a": linear(4, 6), "b": matrix(6, 2)},
        {"DW019 a.weight": 32},
        0,
    ),
    "chain two biases": (
        lambda m, x: tanh(m.b(m.a(x) + m.c)),
        {"a": linear(4, 6), "b": matrix(6, 2), "c": numbers(6)},
        {"DW017 c": 6, "DW019 a.weight": 32},
        0,
    ),
    "softmax mean taken": (
        lambda m, x: softmax(m.b(m.a(x)), -1),
        {"a": matrix(4, 6), "b": matrix(6, 3)},
        {"DW018 b.weight": 6, "DW019 a.weight": 28},
        0,
    ),
    "ln mean taken": (
        lambda m, x: ln(m.b(m.a(x))),
        {"a": matrix(4, 6), "b": matrix(6, 3)},
        {"DW005 b.weight": 6, "DW019 a.weight": 28, "DW014 b.weight": 1},
        0,
    ),
    "lost taken": (
        lambda m, x: tanh(m.b(m.a(ln(x)))),
        {"a": matrix(4, 6), "b": matrix(6, 3)},
        {"DW008 a.weight": 6, "DW019 a.weight": 27},
        0,
    ),
    "lost taken part": (
        lambda m, x: tanh(m.b((h := m.a(ln(x)))[..., :3])) + sin(h[..., 3:]),
        {"a": matrix(4, 6), "b": matrix(3, 3)},
        {"DW008 a.weight": 6, "DW019 a.weight[0:3]": 9},
        0,
    ),
    "relu units": (
        lambda m, x: tanh(m.b(relu(m.a(x)))),
        {"a": linear(4, 5), "b": linear(5, 3)},
        {"DW011 a.weight": 5},
        0,
    ),
    "gated units": (
        lambda m, x: tanh(m.b(m.a(x) * torch.sigmoid(m.c(x)))),
        {"a": linear(4, 5), "b": linear(5, 3), "c": linear(4, 5)},
        {"DW011 a.weight": 5},
        0,
    ),
    "two linear gates": (
        lambda m, x: tanh(m.b(m.a(x) * m.c(x))),
        {"a": linear(4, 5), "b": linear(5, 3), "c": linear(4, 5)},
        {"DW011 a.weight": 5, "DW011 c.weight": 5},
        13,
    ),
    "relu squared": (
        lambda m, x: tanh(m.b(relu(m.a(x)) ** 2)),
        {"a": linear(4, 5), "b": linear(5, 3)},
        {"DW011 a.weight": 5},
        0,
    ),
    "squared": (lambda m, x: tanh(m.b(m.a(x) ** 2)), {"a": linear(4, 5), "b": linear(5, 3)}, {"DW011 a.weight": 5}, 0),
    "relu two writers": (
        lambda m, x: tanh(m.b(relu(m.a(x) + m.c(sin(x))))),
        {"a": matrix(4, 5), "b": linear(5, 3), "c": linear(4, 5)},
        {"DW011 a.weight": 5},
        0,
    ),
    "relu value": (
        lambda m, x: tanh(m.o(att(x, x, relu(m.v(x))))),
        {"v": linear(4, 5), "o": linear(5, 3)},
        {"DW010 v.weight": 5},
        0,
    ),
    "mul channel only": (
        lambda m, x: tanh(m.b(m.a(x) * m.g)),
        {"a": matrix(4, 5), "b": matrix(5, 3), "g": numbers(5)},
        {"DW011 g": 5, "DW019 a.weight": 23},
        0,
    ),
    "div channel data": (
        lambda m, x: tanh(m.b(m.a(x) / (1 + m.c(x) ** 2))),
        {"a": matrix(4, 5), "b": matrix(5, 3), "c": matrix(4, 5)},
        {"DW011 a.weight": 5},
        0,
    ),
    "stream no norm": (
        lambda m, x: tanh(m.r((h := m.a(x)) + m.b(tanh(m.c(h))))),
        {"a": matrix(4, 4), "b": matrix(3, 4), "c": matrix(4, 3), "r": matrix(4, 3)},
        {"DW019 a.weight": 16},
        3,
    ),
    "stream no norm square": (
        lambda m, x: tanh(m.r((h := m.a(x)) + m.b(tanh(m.c(h))))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4), "r": matrix(4, 4)},
        {"DW015 c.weight": 16},
        0,
    ),
    "stream norm square": (
        lambda m, x: tanh(m.r(rms((h := m.a(x)) + m.b(tanh(m.c(rms(h))))))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4), "r": matrix(4, 4)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "stream square slice": (
        lambda m, x: tanh(m.r((h := m.a(x)) + m.b(tanh(m.c(h[..., :2]))))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(2, 4), "r": matrix(4, 4)},
        {"DW019 a.weight": 8},
        4,
    ),
    "one writer square": (
        lambda m, x: tanh(m.c(h := m.a(x))) + sin(m.b(h)),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4)},
        {"DW019 a.weight": 16},
        0,
    ),
    "experts-like bmm": (
        lambda m, x: tanh(m.b(m.a(x)).unsqueeze(1)),
        {"a": matrix(4, 3), "b": matrix(3, 4)},
        {"DW019 a.weight": 9},
        0,
    ),
    "lstm proj": (
        lambda m, x: m.l(x)[0],
        {"l": nn.LSTM(4, 5, proj_size=3, batch_first=True)},
        {"DW017 l.bias_ih_l0": 20},
        0,
    ),
    "lstm proj read": (
        lambda m, x: m.r(m.l(x)[0]),
        {"l": nn.LSTM(4, 5, proj_size=3, batch_first=True), "r": matrix(3, 2)},
        {"DW017 l.bias_ih_l0": 20, "DW019 l.weight_hr_l0": 9},
        0,
    ),
    "lstm proj tanh": (
        lambda m, x: tanh(m.r(m.l(x)[0])),
        {"l": nn.LSTM(4, 3, proj_size=2, batch_first=True), "r": matrix(2, 2)},
        {"DW017 l.bias_ih_l0": 12, "DW019 l.weight_hr_l0": 4},
        0,
    ),
    "matrix read as data": (
        lambda m, x: tanh(F.linear(m.w.T, m.u))[None, :4] + tanh(F.linear(x[:, :4], m.w)).sum(-1, keepdim=True),
        {"w": numbers(3, 4), "u": numbers(2, 3)},
        {},
        0,
    ),
    "matrix read as data T": (
        lambda m, x: (
            tanh(F.linear(m.w.T, m.u))[None, :4].sum(-1, keepdim=True) + tanh(F.linear(F.linear(x[:, :4], m.w), m.v))
        ),
        {"w": numbers(3, 4), "u": numbers(2, 3), "v": numbers(2, 3)},
        {},
        12,
    ),
    "matrix read as data only": (
        lambda m, x: tanh(F.linear(m.w.T, m.u)) + 0 * x.mean(),
        {"w": numbers(3, 4), "u": numbers(2, 3)},
        {},
        10,
    ),
    "matrix read as data square": (
        lambda m, x: tanh(F.linear(m.w, m.u)) + tanh(F.linear(F.linear(x, m.w), m.v)).mean(),
        {"w": numbers(4, 4), "u": numbers(2, 4), "v": numbers(2, 4)},
        {},
        16,
    ),
    "lost taken of the keys alone": (
        lambda m, x: att((h := F.linear(ln(x) * m.g + m.b, m.w))[..., :4], h[..., 4:], x),
        {"w": numbers(8, 4), "g": numbers(4), "b": numbers(4)},
        {"DW006 b": 4, "DW008 w[4:8]": 4, "DW006 g": 4, "DW009 w[4:8]": 16},
        0,
    ),
    "chain before a rotated space": (
        lambda m, x: tanh(m.c(rms(m.b(m.a(x)) + m.d(sin(x))))),
        {"a": matrix(4, 6), "b": matrix(6, 5), "d": matrix(4, 5), "c": matrix(5, 2)},
        {"DW012 b.weight": 10, "DW019 a.weight": 34, "DW014 b.weight": 1},
        0,
    ),
    "chain beside a space that stays": (
        lambda m, x: tanh(m.c(m.b(h := m.a(x)))) + tanh(m.f(m.d(h) + m.e(sin(x)))),
        {
            "a": matrix(4, 6),
            "b": matrix(6, 5),
            "c": matrix(5, 2),
            "d": matrix(6, 3),
            "e": matrix(4, 3),
            "f": matrix(3, 2),
        },
        {"DW019 a.weight": 35, "DW019 b.weight": 25, "DW019 d.weight": 9},
        7,
    ),
    "chain three wide rms": (
        lambda m, x: tanh(m.d(rms(m.c(m.b(m.a(x)))))),
        {"a": matrix(4, 6), "b": matrix(6, 6), "c": matrix(6, 4), "d": matrix(4, 1)},
        {"DW012 c.weight": 6, "DW019 a.weight": 32, "DW019 b.weight": 36, "DW014 c.weight": 1},
        0,
    ),
    "matrix read as columns": (
        lambda m, x: tanh(F.linear(m.w.t(), m.u)).mean() + tanh(F.linear(F.linear(x, m.w), m.v)),
        {"w": numbers(3, 4), "u": numbers(2, 3), "v": numbers(2, 3)},
        {"DW019 w": 9},
        6,
    ),
    "matrix read as columns and transposed": (
        lambda m, x: tanh(F.linear(m.w.t(), m.u)).mean() + tanh(F.linear(F.linear(x, m.w.T), m.v)),
        {"w": numbers(4, 4), "u": numbers(2, 4), "v": numbers(2, 4)},
        {},
        23,
    ),
    "matrix read as columns and in a sine": (
        lambda m, x: tanh(F.linear(m.w.t(), m.u)).mean() + tanh(F.linear(sin(m.w), m.v)).mean() + x,
        {"w": numbers(4, 4), "u": numbers(2, 4), "v": numbers(2, 4)},
        {},
        31,
    ),
    "stream with a gain that writes": (
        lambda m, x: tanh(m.r(h := (m.a(x) + rms(sin(x)) * m.g))) + sin(m.c(h))[..., :3],
        {"a": matrix(4, 4), "c": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW001 c.weight[3:4]": 4, "DW019 a.weight": 4},
        0,
    ),
    "twice behind gains": (
        lambda m, x: tanh(m.c(torch.cat([h := m.a(x), h], -1) * m.g)),
        {"a": matrix(4, 2), "g": numbers(4), "c": matrix(4, 3)},
        {"DW011 g": 4, "DW019 a.weight": 4},
        6,
    ),
    "stream square slice behind a factor": (
        lambda m, x: tanh(m.c(h := (m.a(x) + m.b(sin(x))) * 2)) + sin(m.s(h[..., :2])),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4), "s": matrix(2, 4)},
        {"DW019 a.weight": 8},
        4,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_a_gauge_counts_what_it_moves_once(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


CONVOLUTIONS: dict[str, Case] = {
    "conv chain": (
        lambda m, y: tanh(m.b(m.a(y))),
        {"a": nn.Conv1d(4, 5, 3, bias=False), "b": nn.Conv1d(5, 2, 2, bias=False)},
        {"DW019 a.weight": 25},
        23,
    ),
    "conv mean taken": (
        lambda m, y: ln(m.b(m.a(y)).mT),
        {"a": nn.Conv1d(4, 6, 1, bias=False), "b": nn.Conv1d(6, 3, 2, bias=False)},
        {"DW005 b.weight": 12, "DW019 a.weight": 32, "DW014 b.weight": 1},
        0,
    ),
    "conv softmax taken": (
        lambda m, y: softmax(m.b(m.a(y)), 1),
        {"a": nn.Conv1d(4, 6, 1, bias=False), "b": nn.Conv1d(6, 3, 2, bias=False)},
        {"DW018 b.weight": 12, "DW019 a.weight": 32},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CONVOLUTIONS.values(), ids=list(CONVOLUTIONS))
def test_a_gauge_of_convolutions_counts_what_it_moves_once(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Y, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


def rotated(h: Tensor) -> Tensor:
    """Rotary positions with one frequency for all pairs."""
    angle = 0.7 * torch.arange(h.shape[-2])[:, None]
    a, b = h.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


SHORT: dict[str, tuple[Callable, dict[str, Any], dict[str, int], int]] = {  # and by how much the counts are too low
    "chain before a wide norm": (
        lambda m, x: tanh(m.d(rms(m.c(m.b(m.a(x)))))),
        {"a": matrix(1, 5), "b": matrix(5, 5), "c": matrix(5, 4), "d": matrix(4, 1)},
        {"DW012 c.weight": 5, "DW019 a.weight": 13, "DW019 b.weight": 25, "DW014 c.weight": 1},
        8,
    ),
    "chain before wide rotary queries": (
        lambda m, x: softmax(rotated(m.q(m.a(x))) @ rotated(m.k(x)).mT, -1) @ x,
        {"a": matrix(1, 4), "k": matrix(1, 8), "q": matrix(4, 8)},
        {"DW009 k.weight": 14, "DW019 a.weight": 10},
        18,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "short"), SHORT.values(), ids=list(SHORT))
def test_linked_gauges_that_are_not_solved_for_count_too_little_and_never_too_much(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], short: int
) -> None:
    assert census(forward, X[..., :1], short=short, **parts).findings == findings


def test_a_space_that_is_written_whole_stays_where_its_neighbour_turns() -> None:
    """30 → 40 → 30 beside 30 → 30: of the wide space 10 · 10 turns move nothing, for its reader has 30 rows.

    1,200 unknowns are too many to solve for; without a space that stays the two rows behind it would count instead.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        return tanh(m.c(rms(m.b(m.a(x)) + m.d(sin(x)))))

    parts = {"a": matrix(30, 40), "b": matrix(40, 30), "d": matrix(30, 30), "c": matrix(30, 2)}
    graph = canonical(trace(Odd(forward, **parts), (torch.randn(2, 30),)))
    counted = {graph.parameters[claim.node]: claim.dof for claim in search(graph).claims if claim.code == "DW019"}
    assert counted == {"a.weight": 40 * 40 - 10 * 10}


@pytest.mark.parametrize(("middle", "solved"), [(25, True), (26, False)])
def test_linked_gauges_are_solved_for_up_to_a_thousand_unknowns(middle: int, solved: bool) -> None:
    """Of a chain 12 → n → 40 → 12 the product alone counts, 12 × 12 numbers; 25 · 40 are a thousand."""
    chain = nn.Sequential(matrix(12, middle), matrix(middle, 40), matrix(40, 12), nn.Tanh())
    graph = canonical(trace(chain, (torch.randn(2, 12),)))
    counted = sum(claim.dof for claim in search(graph).claims)
    redundant = sum(p.numel() for p in chain.parameters()) - 12 * 12
    assert counted == redundant if solved else counted < redundant


TABLES: dict[str, Case] = {
    "tables wide": (lambda m, t: tanh(m.r(m.e(t))), {"e": table(7, 9), "r": matrix(9, 2)}, {"DW019 e.weight": 67}, 0),
    "tables wide two": (
        lambda m, t: tanh(m.r(m.e(t) + m.p)),
        {"e": table(7, 12), "p": numbers(5, 12), "r": matrix(12, 2)},
        {"DW013 p": 12, "DW019 e.weight": 134},
        0,
    ),
    "tables wide unread": (
        lambda m, t: tanh(m.r(m.p(torch.arange(5) + 2))) + 0 * t.sum(),
        {"p": table(9, 12), "r": matrix(12, 2)},
        {"DW001 p.weight[0:2]": 24, "DW019 p.weight": 94},
        4,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_a_gauge_of_tables_counts_what_it_moves_once(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
