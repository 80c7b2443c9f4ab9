"""A tied table before a norm: its scale is undone by the gain and shift that its readout reads (DW014).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import sin, tanh

from .parts import T, ln, numbers, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


CASES: dict[str, Case] = {
    "plain gain": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5, "DW013 e.weight": 1, "DW014 e.weight": 1},
        0,
    ),
    "gain and shift": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "shift read elsewhere": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight) + sin(m.b.sum()),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "gain read elsewhere": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight) + sin(m.g.sum()),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "sum read elsewhere": (
        lambda m, t: F.linear((n := (ln(m.e(t) + m.p) * m.g + m.b)), m.e.weight) + sin(n).sum(),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        0,
    ),
    "returned sum": (
        lambda m, t: (F.linear((n := (ln(m.e(t) + m.p) * m.g + m.b)), m.e.weight), n),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        0,
    ),
    "shift computed": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + sin(m.b), m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "no gain": (
        lambda m, t: F.linear(ln(m.e(t) + m.p), m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4)},
        {"DW005 p": 5, "DW013 e.weight": 1},
        9,
    ),
    "no gain shift": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) + m.b, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "b": numbers(4)},
        {"DW005 p": 5},
        7,
    ),
    "times two": (
        lambda m, t: F.linear((ln(m.e(t) + m.p) * m.g + m.b) * 2, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "two over": (
        lambda m, t: F.linear(2 / (ln(m.e(t) + m.p) * m.g + m.b), m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "plus two": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b + 2, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "tanh": (
        lambda m, t: F.linear(tanh(ln(m.e(t) + m.p) * m.g + m.b), m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        0,
    ),
    "squared": (
        lambda m, t: F.linear((n := (ln(m.e(t) + m.p) * m.g + m.b)) * n, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "gain of tanh": (
        lambda m, t: F.linear(tanh(ln(m.e(t) + m.p)) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "gain of data": (
        lambda m, t: F.linear(tanh(ln(m.e(t) + m.p)) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "transposed places": (
        lambda m, t: F.linear((ln(m.e(t) + m.p) * m.g).transpose(0, 1), m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5, "DW013 e.weight": 1, "DW014 e.weight": 1},
        0,
    ),
    "readout is data": (
        lambda m, t: tanh(F.linear(m.e.weight, m.w))[:5] + ln(m.e(t) + m.p) * m.g,
        {"e": table(7, 4), "p": numbers(5, 4), "w": numbers(4, 4), "g": numbers(4)},
        {"DW005 p": 5},
        7,
    ),
    "two readouts": (
        lambda m, t: F.linear((h := ln(m.e(t) + m.p)) * m.g, m.e.weight) + sin(F.linear(h * m.k, m.e.weight)),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "k": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "two readouts same": (
        lambda m, t: F.linear((h := ln(m.e(t) + m.p)) * m.g, m.e.weight) + sin(F.linear(h * m.g, m.e.weight)),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        2,
    ),
    "two shifts": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b + m.c, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4), "c": numbers(4)},
        {"DW005 p": 5, "DW017 c": 4, "DW014 e.weight": 1},
        0,
    ),
    "1+w": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * (1 + m.g) + m.b, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "weight view": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight * 2),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        2,
    ),
    "readout bias": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight) + m.b,
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(7)},
        {"DW005 p": 5, "DW013 e.weight": 1, "DW014 e.weight": 1},
        0,
    ),
    "stream reads shift": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "shift is in the stream": (
        lambda m, t: F.linear(ln(m.e(t) + m.b) * m.g + m.b, m.e.weight),
        {"e": table(7, 4), "g": numbers(4), "b": numbers(4)},
        {},
        0,
    ),
    "gain is in the stream": (
        lambda m, t: F.linear(ln(m.e(t) + m.p * m.g) * m.g, m.e.weight),
        {"e": table(7, 4), "g": numbers(4), "p": numbers(5, 4)},
        {},
        7,
    ),
    "looked up twice in one sum": (
        lambda m, t: F.linear(ln(m.p(t) + m.e(t) + m.e(t.flip(1))) * m.g, m.e.weight),
        {"p": table(7, 4), "e": table(7, 4), "g": numbers(4)},
        {"DW005 p.weight": 7, "DW013 e.weight": 1, "DW014 p.weight": 1},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_the_scale_of_a_tied_table_is_undone_before_the_readout_or_nowhere(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
