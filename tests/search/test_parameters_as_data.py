"""Parameters that are read as data: a weight that its own map reads, a bias that is a factor elsewhere.

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, relu, softmax, tanh

from .parts import T, X, Y, att, ln, numbers, rms, table

T4 = T.clamp(max=3)
Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, 2))


CASES: dict[str, Case] = {
    "read as data": (
        lambda m, x: tanh(F.linear(m.w.T, m.u)) + 0 * x.mean(),
        {"w": numbers(3, 4), "u": numbers(2, 3)},
        {},
        10,
    ),
    "heads of data": (
        lambda m, x: tanh(rms(hd(F.linear(m.w, m.u)))) + x.mean(),
        {"w": numbers(4, 4), "u": numbers(4, 4)},
        {"DW014 w": 4, "DW014 u": 1},
        19,
    ),
    "heads of itself": (
        lambda m, x: tanh(rms(hd(F.linear(m.w, m.w)))) + x.mean(),
        {"w": numbers(4, 4)},
        {"DW014 w": 1},
        8,
    ),
    "heads of itself T": (
        lambda m, x: tanh(rms(hd(F.linear(m.w.T, m.w)))) + x.mean(),
        {"w": numbers(4, 4)},
        {"DW014 w": 1},
        7,
    ),
    "linear of itself": (lambda m, x: tanh(F.linear(m.w, m.w))[None] + x[:, :4], {"w": numbers(4, 4)}, {}, 6),
    "norm of linear of itself": (
        lambda m, x: tanh(rms(F.linear(m.w, m.w)))[None] + x[:, :4],
        {"w": numbers(4, 4)},
        {"DW014 w": 1},
        6,
    ),
    "ln of linear of itself": (
        lambda m, x: tanh(ln(F.linear(m.w, m.w)))[None] + x[:, :4],
        {"w": numbers(4, 4)},
        {"DW014 w": 1},
        7,
    ),
    "chain of data": (
        lambda m, x: tanh(F.linear(F.linear(m.w, m.u), m.v))[None] + x[:, :4].sum(),
        {"w": numbers(4, 4), "u": numbers(4, 4), "v": numbers(4, 4)},
        {"DW019 u": 16},
        16,
    ),
    "ln reads w, weight w": (lambda m, x: tanh(F.linear(ln(m.w), m.w))[None] + x[:, :4], {"w": numbers(4, 4)}, {}, 7),
    "ln reads weight u": (
        lambda m, x: tanh(F.linear(ln(m.w), m.u))[None] + x[:, :4],
        {"w": numbers(4, 4), "u": numbers(4, 4)},
        {"DW004 w": 4, "DW008 u": 4, "DW014 w": 4},
        5,
    ),
    "matmul of parameters": (lambda m, x: tanh(x @ (m.w @ m.u)), {"w": numbers(4, 3), "u": numbers(3, 4)}, {}, 9),
    "matmul of itself": (lambda m, x: tanh(x @ (m.w @ m.w.T)), {"w": numbers(4, 3)}, {}, 3),
    "factor on itself": (
        lambda m, x: tanh(F.linear(m.w, m.w) * m.g)[None] + x[:, :4],
        {"w": numbers(4, 4), "g": numbers(4)},
        {},
        7,
    ),
    "factor on data": (
        lambda m, x: tanh(F.linear(m.w, m.u) * m.g)[None] + x[:, :4],
        {"w": numbers(4, 4), "u": numbers(4, 4), "g": numbers(4)},
        {},
        20,
    ),
    "same value itself": (
        lambda m, x: tanh(F.linear(m.w, m.w) + F.linear(m.w, m.u))[None] + x[:, :4],
        {"w": numbers(4, 4), "u": numbers(4, 4)},
        {},
        16,
    ),
    "q k itself": (
        lambda m, x: att(F.linear(m.w, m.w)[None], F.linear(x, m.k), x),
        {"w": numbers(4, 4), "k": numbers(4, 4)},
        {},
        16,
    ),
    "q k data": (
        lambda m, x: att(F.linear(m.w, m.q)[None], F.linear(x, m.k), x),
        {"w": numbers(4, 4), "k": numbers(4, 4), "q": numbers(4, 4)},
        {"DW009 k": 16},
        16,
    ),
    "q k crossed": (
        lambda m, x: att(F.linear(m.k, m.q)[None], F.linear(x, m.k), x),
        {"k": numbers(4, 4), "q": numbers(4, 4)},
        {},
        16,
    ),
    "v reads itself": (
        lambda m, x: tanh(F.linear(softmax(x @ x.mT, -1) @ F.linear(m.v.expand(2, 5, 4), m.w), m.o)),
        {"v": numbers(5, 4), "w": numbers(4, 4), "o": numbers(3, 4)},
        {"DW010 w": 16},
        17,
    ),
    "relu itself": (
        lambda m, x: tanh(F.linear(relu(F.linear(m.w, m.w)), m.o))[None] + x.mean(),
        {"w": numbers(4, 4), "o": numbers(3, 4)},
        {},
        16,
    ),
    "relu reader data": (
        lambda m, x: tanh(F.linear(relu(F.linear(m.o, m.w)), m.o))[None] + x.mean(),
        {"w": numbers(4, 4), "o": numbers(4, 4)},
        {},
        16,
    ),
    "bias reads": (
        lambda m, x: tanh(F.linear(relu(F.linear(x, m.w) + m.b), m.o) + F.linear(m.b, m.o)),
        {"w": numbers(4, 4), "o": numbers(3, 4), "b": numbers(4)},
        {"DW011 w": 4},
        0,
    ),
    "gain reads": (
        lambda m, x: tanh(F.linear(rms(x) * m.g, m.o) + F.linear(m.g, m.o)),
        {"o": numbers(3, 4), "g": numbers(4)},
        {},
        4,
    ),
    "shift reads": (
        lambda m, x: tanh(F.linear(ln(x) + m.g, m.o) + F.linear(m.g, m.o) + m.c),
        {"o": numbers(3, 4), "g": numbers(4), "c": numbers(3)},
        {"DW017 g": 4},
        3,
    ),
    "lost reads": (
        lambda m, x: tanh(F.linear(ln(x) * m.g + m.b, m.o) + F.linear(m.b, m.o) + m.c),
        {"o": numbers(3, 4), "g": numbers(4), "b": numbers(4), "c": numbers(3)},
        {"DW017 b": 4},
        7,
    ),
    "key bias data": (
        lambda m, x: att(F.linear(x, m.q), F.linear(x, m.k) + m.b, x) + m.q @ m.b,
        {"q": numbers(4, 4), "k": numbers(4, 4), "b": numbers(4)},
        {},
        16,
    ),
    "norm gain weight": (lambda m, x: tanh(F.linear(rms(x) * m.o[0], m.o)), {"o": numbers(3, 4)}, {}, 0),
    "norm shift weight": (
        lambda m, x: tanh(F.linear(ln(x) + m.o[0], m.o) + m.c),
        {"o": numbers(3, 4), "c": numbers(3)},
        {},
        3,
    ),
    "factor row": (lambda m, x: tanh(F.linear(x, m.w) * m.w[:, 0]), {"w": numbers(3, 4)}, {}, 0),
    "factor bias is factor": (
        lambda m, x: tanh((F.linear(x, m.w) + m.g) * m.g),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_what_is_read_as_data_is_no_weight(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


TABLES: dict[str, Case] = {
    "table as weight of table": (lambda m, t: tanh(F.linear(m.e(t), m.e.weight)), {"e": table(7, 4)}, {}, 6),
    "table as weight of norm": (lambda m, t: tanh(F.linear(rms(m.e(t)), m.e.weight)), {"e": table(7, 4)}, {}, 6),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_a_table_that_is_read_as_data_is_no_weight(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


SQUARE: dict[str, Case] = {
    "table as weight of own norm square": (
        lambda m, t: tanh(rms(hd(F.linear(m.e(t), m.e.weight)))),
        {"e": table(4, 4)},
        {},
        9,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), SQUARE.values(), ids=list(SQUARE))
def test_a_square_table_that_is_read_as_data_is_no_weight(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T4, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


CHANNELS: dict[str, Case] = {
    "conv of its own weight": (lambda m, y: tanh(F.conv1d(m.w, m.w)).mean() + y, {"w": numbers(4, 4, 1)}, {}, 15),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CHANNELS.values(), ids=list(CHANNELS))
def test_a_convolution_of_its_own_weight_is_not_linear_in_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Y, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
