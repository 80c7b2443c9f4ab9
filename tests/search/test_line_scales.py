"""Every vector that a norm reads has a scale of its own, if parameters of its own write it (DW014).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, sin, tanh

from .parts import Buffers, X, linear, ln, matrix, numbers, rms, table

Z = torch.tensor([[0, 1, 2], [2, 1, 0]])
Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, 2))


TABLES: dict[str, Case] = {
    "rows": (lambda m, t: rms(m.e(t)), {"e": table(4, 3)}, {"DW014 e.weight": 4}, 2),
    "rows some read": (
        lambda m, t: rms(m.e(torch.arange(3) + 1)) + 0 * t.sum(),
        {"e": table(4, 3)},
        {"DW001 e.weight[0:1]": 3, "DW014 e.weight[1:4]": 3},
        0,
    ),
    "rows twice": (lambda m, t: rms(m.e(t)) + tanh(rms(m.e(t.flip(1)))), {"e": table(3, 3)}, {"DW014 e.weight": 3}, 0),
    "rows also tanh": (lambda m, t: rms(m.e(t)) + tanh(m.e(t)), {"e": table(3, 3)}, {}, 0),
    "rows returned": (lambda m, t: (rms(h := m.e(t)), h), {"e": table(3, 3)}, {}, 0),
    "rows sum": (
        lambda m, t: rms(m.e(t) + m.p),
        {"e": table(3, 3), "p": numbers(3, 3)},
        {"DW013 p": 3, "DW014 e.weight": 1},
        0,
    ),
    "rows bias": (
        lambda m, t: rms(m.e(t) + m.p),
        {"e": table(3, 3), "p": numbers(3)},
        {"DW017 p": 3, "DW014 e.weight": 1},
        2,
    ),
    "rows times 2": (lambda m, t: rms(m.e(t) * 2), {"e": table(3, 3)}, {"DW014 e.weight": 3}, 0),
    "rows over 2": (lambda m, t: rms(m.e(t) / 2), {"e": table(3, 3)}, {"DW014 e.weight": 3}, 0),
    "two over rows": (lambda m, t: rms(2 / m.e(t)), {"e": table(3, 3)}, {}, 3),
    "rows plus 2": (lambda m, t: rms(m.e(t) + 2), {"e": table(3, 3)}, {}, 3),
    "rows times itself": (lambda m, t: rms((h := m.e(t)) * h), {"e": table(3, 3)}, {}, 3),
    "rows as weights": (lambda m, t: rms(m.e(t)) @ rms(m.e.weight).T, {"e": table(3, 3)}, {}, 6),
    "rows concatenated": (lambda m, t: rms(m.e(t).reshape(2, 9)), {"e": table(3, 3)}, {}, 1),
    "rows halves": (lambda m, t: rms(m.e(t).reshape(2, 3, 2, 2)), {"e": table(3, 4)}, {"DW014 e.weight": 3}, 3),
    "rows normed over places": (lambda m, t: rms(m.e(t).mT), {"e": table(3, 3)}, {}, 3),
    "rows over two axes": (lambda m, t: F.layer_norm(m.e(t), (3, 3), eps=0.0), {"e": table(3, 3)}, {}, 2),
    "rows ln": (lambda m, t: ln(m.e(t)), {"e": table(3, 3)}, {"DW005 e.weight": 3, "DW014 e.weight": 3}, 0),
    "rows unit": (lambda m, t: F.normalize(m.e(t), dim=-1, eps=0.0), {"e": table(3, 3)}, {"DW014 e.weight": 3}, 0),
    "rows index": (lambda m, t: rms(m.e(t)[:, torch.tensor([0, 0, 1])]), {"e": table(3, 3)}, {}, 3),
    "rows flip": (lambda m, t: rms(m.e(t).flip(-1)), {"e": table(3, 3)}, {"DW014 e.weight": 3}, 0),
    "rows chunk": (
        lambda m, t: rms(m.e(t).chunk(2, -1)[0]) + tanh(rms(m.e(t).chunk(2, -1)[1])),
        {"e": table(3, 4)},
        {"DW014 e.weight": 3},
        3,
    ),
    "rows chunk tanh": (
        lambda m, t: rms(m.e(t).chunk(2, -1)[0]) + tanh(m.e(t).chunk(2, -1)[1]),
        {"e": table(3, 4)},
        {},
        6,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_rows_that_only_norms_read_have_scales_of_their_own(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Z, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


def test_a_bias_of_the_one_row_that_is_read_keeps_its_scale(census: Callable) -> None:
    counted = census(lambda m, t: rms(m.e(t) + m.p), torch.tensor([[3]]), e=table(4, 3), p=numbers(3))
    assert counted.findings == {"DW017 p": 3, "DW014 e.weight": 1}


HEADS: dict[str, Case] = {
    "heads": (lambda m, x: tanh(rms(hd(m.a(x)))), {"a": linear(4, 4)}, {"DW014 a.weight": 2}, 0),
    "heads nobias": (lambda m, x: tanh(rms(hd(m.a(x)))), {"a": matrix(4, 4)}, {"DW014 a.weight": 2}, 0),
    "heads one tanh": (
        lambda m, x: tanh(rms((h := hd(m.a(x)))[..., 0, :])) + tanh(h[..., 1, :]),
        {"a": linear(4, 4)},
        {},
        1,
    ),
    "heads bias shared": (
        lambda m, x: tanh(rms(hd(F.linear(x, m.w) + m.b))) + m.b.sum(),
        {"w": numbers(4, 4), "b": numbers(4)},
        {},
        1,
    ),
    "heads bias returned": (
        lambda m, x: (tanh(rms(hd(F.linear(x, m.w) + m.b))), m.b),
        {"w": numbers(4, 4), "b": numbers(4)},
        {},
        0,
    ),
    "heads bias places": (
        lambda m, x: tanh(rms(hd(F.linear(x, m.w) + m.b))),
        {"w": numbers(4, 4), "b": numbers(5, 4)},
        {"DW014 w": 1},
        1,
    ),
    "heads bias alpha": (
        lambda m, x: tanh(rms(hd(torch.add(F.linear(x, m.w), m.b, alpha=2)))),
        {"w": numbers(4, 4), "b": numbers(4)},
        {"DW014 w": 1},
        1,
    ),
    "heads bias later": (
        lambda m, x: tanh(rms(hd(F.linear(x, m.w)) + m.b)),
        {"w": numbers(4, 4), "b": numbers(2)},
        {"DW014 w": 1},
        0,
    ),
    "heads bias number": (lambda m, x: tanh(rms(hd(F.linear(x, m.w) + 1))), {"w": numbers(4, 4)}, {}, 0),
    "heads bias data": (lambda m, x: tanh(rms(hd(F.linear(x, m.w) + x))), {"w": numbers(4, 4)}, {}, 2),
    "heads two biases": (
        lambda m, x: tanh(rms(hd(F.linear(x, m.w) + m.b + m.c))),
        {"w": numbers(4, 4), "b": numbers(4), "c": numbers(4)},
        {"DW017 b": 4, "DW014 w": 2},
        0,
    ),
    "heads whole": (lambda m, x: tanh(rms(m.a(x))), {"a": linear(4, 4)}, {"DW014 a.weight": 1}, 0),
    "heads both": (
        lambda m, x: tanh(rms(hd(h := m.a(x)))) + tanh(rms(h)).unflatten(-1, (2, 2)),
        {"a": linear(4, 4)},
        {"DW014 a.weight": 1},
        0,
    ),
    "heads places mixed": (lambda m, x: tanh(rms(m.a(x).reshape(2, 2, 10))), {"a": linear(4, 4)}, {}, 1),
    "heads weight tied": (
        lambda m, x: tanh(rms(hd(m.a(x)))) + m.a(sin(x)).unflatten(-1, (2, 2)),
        {"a": linear(4, 4)},
        {},
        0,
    ),
    "heads weight T": (lambda m, x: tanh(rms(hd(F.linear(x, m.w.T)))), {"w": numbers(4, 4)}, {"DW014 w": 2}, 0),
    "heads transposed": (
        lambda m, x: tanh(rms(hd(m.a(x)).transpose(-1, -2))),
        {"a": linear(4, 4)},
        {"DW014 a.weight": 2},
        0,
    ),
    "heads eps": (
        lambda m, x: tanh(F.rms_norm(hd(m.a(x)), (2,), eps=0.001)),
        {"a": linear(4, 4)},
        {"DW014 a.weight": 2},
        0,
    ),
    "heads ln": (
        lambda m, x: tanh(ln(m.a(x).unflatten(-1, (2, 3)))),
        {"a": linear(4, 6)},
        {"DW005 a.weight": 8, "DW005 a.bias": 2, "DW014 a.weight": 2},
        0,
    ),
    "one of three heads read elsewhere": (
        lambda m, x: rms(h := m.a(x).unflatten(-1, (3, 2))) + tanh(h[..., :1, :]),
        {"a": matrix(4, 6)},
        {"DW014 a.weight[2:6]": 2},
        0,
    ),
    "heads constant bias": (
        lambda m, x: rms(hd(m.a(x) + m.q.u)),
        {"a": matrix(4, 4), "q": Buffers(u=numbers(4))},
        {},
        0,
    ),
    "heads computed bias": (
        lambda m, x: rms(hd(m.a(x) + sin(m.c))),
        {"a": matrix(4, 4), "c": numbers(4)},
        {},
        2,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), HEADS.values(), ids=list(HEADS))
def test_heads_that_only_norms_read_have_scales_of_their_own(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
