"""What a norm adds: into its readers (DW006), or past the skip into the biases behind it (DW007).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn, sin, tanh

from .parts import X, att, linear, ln, matrix, numbers, rms

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def lay(m: Any, h: Tensor) -> Tensor:
    """A layer with a skip around it and a norm behind it."""
    return m.n(h + m.d(tanh(m.w(h))))


CASES: dict[str, Case] = {
    "norm shift residual": (
        lambda m, x: tanh((h := (ln(x) * m.g + m.b)) + m.o(tanh(m.i(h)))),
        {"g": numbers(4), "b": numbers(4), "i": linear(4, 3), "o": linear(3, 4)},
        {"DW007 b": 4, "DW008 i.weight": 3},
        0,
    ),
    "norm shift residual no bias": (
        lambda m, x: tanh((h := (ln(x) * m.g + m.b)) + m.o(tanh(m.i(h)))),
        {"g": numbers(4), "b": numbers(4), "i": linear(4, 3), "o": matrix(3, 4)},
        {"DW008 i.weight": 3},
        0,
    ),
    "norm shift residual no inner bias": (
        lambda m, x: tanh((h := (ln(x) * m.g + m.b)) + m.o(tanh(m.i(h)))),
        {"g": numbers(4), "b": numbers(4), "i": matrix(4, 3), "o": linear(3, 4)},
        {"DW007 b": 4},
        0,
    ),
    "norm shift rms inner": (
        lambda m, x: tanh((h := (rms(x) * m.g + m.b)) + m.o(tanh(m.i(h)))),
        {"g": numbers(4), "b": numbers(4), "i": linear(4, 3), "o": linear(3, 4)},
        {"DW007 b": 4},
        0,
    ),
    "norm shift readers": (
        lambda m, x: tanh(m.i(h := (ln(x) * m.g + m.b))) + sin(m.o(h)),
        {"g": numbers(4), "b": numbers(4), "i": linear(4, 3), "o": linear(4, 3)},
        {"DW006 b": 4, "DW008 i.weight": 3, "DW008 o.weight": 3, "DW006 g": 4},
        0,
    ),
    "norm shift readers one biasless": (
        lambda m, x: tanh(m.i(h := (ln(x) * m.g + m.b))) + sin(m.o(h)),
        {"g": numbers(4), "b": numbers(4), "i": linear(4, 3), "o": matrix(4, 3)},
        {"DW006 b": 4, "DW008 i.weight": 3, "DW006 g": 4},
        0,
    ),
    "norm shift both biasless": (
        lambda m, x: tanh(m.i(h := (ln(x) * m.g + m.b))) + sin(m.o(h)),
        {"g": numbers(4), "b": numbers(4), "i": matrix(4, 3), "o": matrix(4, 3)},
        {"DW006 b": 4, "DW006 g": 4},
        0,
    ),
    "norm shift conv": (
        lambda m, x: tanh(m.i((ln(x) * m.g + m.b).mT)),
        {"g": numbers(4), "b": numbers(4), "i": nn.Conv1d(4, 3, 1)},
        {"DW006 b": 4, "DW006 g": 4},
        3,
    ),
    "norm shift conv padded": (
        lambda m, x: tanh(m.i((ln(x) * m.g + m.b).mT)),
        {"g": numbers(4), "b": numbers(4), "i": nn.Conv1d(4, 3, 3, padding=1)},
        {"DW006 g": 4},
        7,
    ),
    "norm shift attention": (
        lambda m, x: tanh((h := (ln(x) * m.g + m.b)) + m.o(att(m.q(h), m.k(h), m.v(h)))),
        {"g": numbers(4), "b": numbers(4), "q": linear(), "k": linear(), "v": linear(), "o": linear()},
        {
            "DW002 k.bias": 4,
            "DW003 v.bias": 4,
            "DW007 b": 4,
            "DW008 q.weight": 4,
            "DW008 k.weight": 4,
            "DW008 v.weight": 4,
            "DW009 k.weight": 16,
            "DW010 v.weight": 16,
        },
        0,
    ),
    "shared layer": (
        lambda m, x: tanh(m.n(m.n(m.a(x) + m.i) + m.d(tanh(m.n(m.a(x) + m.i))))),
        {"n": nn.LayerNorm(4, eps=0.0), "a": matrix(4, 4), "i": numbers(4), "d": linear(4, 4)},
        {"DW005 i": 1, "DW005 a.weight": 4, "DW005 d.weight": 4, "DW005 d.bias": 1, "DW014 a.weight": 1},
        0,
    ),
    "shared norm twice": (
        lambda m, x: tanh(lay(m, lay(m, m.a(x)))),
        {"n": nn.LayerNorm(4, eps=0.0), "a": linear(4, 4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        1,
    ),
    "shared norm twice ln first": (
        lambda m, x: tanh(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "shared norm twice partner read": (
        lambda m, x: tanh(lay(m, lay(m, ln(x) + m.i))) + m.i,
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "shared norm twice partner (1,4)": (
        lambda m, x: tanh(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(1, 4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "shared norm twice partner minus": (
        lambda m, x: tanh(lay(m, lay(m, ln(x) - m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "shared norm twice partner elsewhere": (
        lambda m, x: tanh(lay(m, lay(m, ln(x) * 2 + x))) + tanh(m.i + m.a(x)),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "a": linear(4, 4)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW017 i": 4},
        0,
    ),
    "shared norm out linear": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": linear(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW007 n.bias": 4, "DW008 r.weight": 2},
        0,
    ),
    "shared norm out linear no": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW007 n.bias": 4},
        0,
    ),
    "partner": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW007 n.bias": 4},
        0,
    ),
    "partner read elsewhere": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))) + m.i.sum(),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        4,
    ),
    "partner in a row": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(1, 4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        4,
    ),
    "partner subtracted": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) - m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        4,
    ),
    "partner multiplies": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) * m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW014 i": 1},
        0,
    ),
    "partner of another width": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(1), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        1,
    ),
    "no partner": (
        lambda m, x: m.r(lay(m, lay(m, x))),
        {"n": nn.LayerNorm(4, eps=0.0), "d": linear(3, 4), "w": linear(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "partner of another layer": (
        lambda m, x: m.r(lay(m, lay(m, x))) + m.u(ln(sin(x)) + m.i),
        {
            "n": nn.LayerNorm(4, eps=0.0),
            "d": linear(3, 4),
            "w": linear(4, 3),
            "r": matrix(4, 2),
            "i": numbers(4),
            "u": matrix(4, 2),
        },
        {"DW005 d.weight": 3, "DW005 d.bias": 1, "DW006 i": 4},
        2,
    ),
    "partner and output": (
        lambda m, x: lay(m, lay(m, ln(x) + m.i)),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": linear(3, 4), "w": linear(4, 3)},
        {"DW005 d.weight": 3, "DW005 d.bias": 1},
        0,
    ),
    "partner without bias": (
        lambda m, x: m.r(lay(m, lay(m, ln(x) + m.i))),
        {"n": nn.LayerNorm(4, eps=0.0), "i": numbers(4), "d": matrix(3, 4), "w": matrix(4, 3), "r": matrix(4, 2)},
        {"DW005 d.weight": 3},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_the_shift_of_a_norm_goes_where_biases_take_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
