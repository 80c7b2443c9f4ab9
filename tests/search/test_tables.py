"""Tables: rows that nothing reads, and vectors that move from one to another (DW001, DW005, DW013, DW018).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, softmax, tanh

from .parts import T, X, linear, ln, matrix, numbers, rms, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, 2))


TOKENS: dict[str, Case] = {
    "table by constant normed": (
        lambda m, t: rms(m.e(torch.arange(4))) + 0 * t.sum(),
        {"e": table(4, 3)},
        {"DW014 e.weight": 4},
        0,
    ),
    "table by constant linear normed": (
        lambda m, t: rms(m.a(m.e(torch.arange(4)))) + 0 * t.sum(),
        {"e": table(4, 3), "a": matrix(3, 3)},
        {"DW019 e.weight": 9, "DW014 a.weight": 1},
        3,
    ),
    "table by constant lin heads normed": (
        lambda m, t: rms(hd(m.a(m.e(torch.arange(4))))) + 0 * t.sum(),
        {"e": table(4, 3), "a": matrix(3, 4)},
        {"DW019 e.weight": 9, "DW014 a.weight": 1},
        6,
    ),
    "table softmax": (lambda m, t: softmax(m.e(t), -1), {"e": table(7, 4)}, {"DW018 e.weight": 7}, 0),
    "table softmax places": (lambda m, t: softmax(m.e(t), 1), {"e": table(7, 4)}, {"DW018 e.weight": 4}, 0),
    "table scores": (
        lambda m, t: softmax(m.e(t)[..., 0] + m.p, -1),
        {"e": table(7, 1), "p": numbers(5)},
        {"DW018 p": 1, "DW018 e.weight": 1},
        0,
    ),
    "two tables": (
        lambda m, t: tanh(m.e(t) + m.p(t.flip(1))),
        {"e": table(7, 4), "p": table(7, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "three tables": (
        lambda m, t: tanh(m.e(t) + m.p(t.flip(1)) + m.q(t.roll(1, 1))),
        {"e": table(7, 4), "p": table(7, 4), "q": table(7, 4)},
        {"DW013 e.weight": 4, "DW013 p.weight": 4},
        0,
    ),
    "table and bias": (lambda m, t: tanh(m.e(t) + m.p), {"e": table(7, 4), "p": numbers(4)}, {"DW017 p": 4}, 0),
    "table and matrix bias": (
        lambda m, t: tanh(m.e(t) + m.p),
        {"e": table(7, 4), "p": numbers(5, 4)},
        {"DW013 p": 4},
        0,
    ),
    "table and matrix bias slice": (
        lambda m, t: tanh(m.e(t) + m.p[:5]),
        {"e": table(7, 4), "p": numbers(8, 4)},
        {"DW013 p": 4},
        12,
    ),
    "table vector": (
        lambda m, t: tanh(m.e(t) + m.p(t.flip(1))),
        {"e": table(7, 1), "p": table(7, 1)},
        {"DW013 e.weight": 1},
        0,
    ),
    "table minus": (lambda m, t: tanh(m.e(t) - m.p(t.flip(1))), {"e": table(7, 4), "p": table(7, 4)}, {}, 4),
    "table alpha": (
        lambda m, t: tanh(torch.add(m.e(t), m.p(t.flip(1)), alpha=2)),
        {"e": table(7, 4), "p": table(7, 4)},
        {},
        4,
    ),
    "table times": (lambda m, t: tanh(m.e(t) * m.p(t.flip(1))), {"e": table(7, 4), "p": table(7, 4)}, {}, 4),
    "table twice itself": (lambda m, t: tanh(m.e(t) + m.e(t.flip(1))), {"e": table(7, 4)}, {}, 0),
    "table less itself": (lambda m, t: tanh(m.e(t) - m.e(t.flip(1))), {"e": table(7, 4)}, {}, 4),
    "table linear bias": (
        lambda m, t: tanh(m.a(m.e(t))),
        {"e": table(7, 4), "a": linear(4, 4)},
        {"DW013 e.weight": 4, "DW019 e.weight": 16},
        0,
    ),
    "table ln two": (
        lambda m, t: ln(m.e(t) + m.p(t.flip(1)) + m.b),
        {"e": table(7, 4), "p": table(7, 4), "b": numbers(4)},
        {
            "DW005 b": 1,
            "DW005 e.weight": 7,
            "DW005 p.weight": 7,
            "DW017 b": 3,
            "DW013 e.weight": 3,
            "DW014 e.weight": 1,
        },
        0,
    ),
    "table ln unread": (
        lambda m, t: ln(m.e(t) + m.p(torch.arange(5) + 2)),
        {"e": table(7, 4), "p": table(9, 4)},
        {
            "DW001 p.weight[0:2]": 8,
            "DW005 e.weight": 7,
            "DW005 p.weight[2:9]": 7,
            "DW013 e.weight": 3,
            "DW014 e.weight": 1,
        },
        6,
    ),
    "table unread": (
        lambda m, t: tanh(m.e(t) + m.p(torch.arange(5) + 2)),
        {"e": table(7, 4), "p": table(9, 4)},
        {"DW001 p.weight[0:2]": 8, "DW013 e.weight": 4},
        8,
    ),
    "table unread read": (
        lambda m, t: tanh(m.e(t) + m.p(torch.arange(5) + 2)) + m.p.weight.sum(),
        {"e": table(7, 4), "p": table(9, 4)},
        {},
        19,
    ),
    "table unread twice": (
        lambda m, t: tanh(m.e(t) + m.p(torch.arange(5) + 2) + m.p(torch.arange(5) + 1)),
        {"e": table(7, 4), "p": table(9, 4)},
        {"DW013 p.weight": 4},
        16,
    ),
    "table bounded": (
        lambda m, t: tanh(m.e((t != 1).long().cumsum(1) + 2)),
        {"e": table(9, 4)},
        {"DW001 e.weight[0:2]": 8},
        4,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TOKENS.values(), ids=list(TOKENS))
def test_what_tables_may_do(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


SCORES: dict[str, Case] = {
    "relative bias": (
        lambda m, x: softmax(x @ x.mT + m.b[(torch.arange(5)[:, None] - torch.arange(5)).abs()], -1) @ x,
        {"b": numbers(5)},
        {"DW018 b": 1},
        0,
    ),
    "relative bias heads": (
        lambda m, x: (
            softmax((x @ x.mT)[:, None] + m.b(torch.arange(5)[:, None] - torch.arange(5) + 4).permute(2, 0, 1), -1)
            @ x[:, None]
        ),
        {"b": table(9, 2)},
        {"DW018 b.weight": 2},
        0,
    ),
    "relative bias heads some": (
        lambda m, x: (
            softmax(
                (x @ x.mT)[:, None] + m.b((torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0)).permute(2, 0, 1),
                -1,
            )
            @ x[:, None]
        ),
        {"b": table(9, 2)},
        {"DW018 b.weight": 2},
        8,
    ),
    "relative bias tanh": (
        lambda m, x: (
            softmax(
                (x @ x.mT)[:, None] + tanh(m.b(torch.arange(5)[:, None] - torch.arange(5) + 4).permute(2, 0, 1)), -1
            )
            @ x[:, None]
        ),
        {"b": table(9, 2)},
        {},
        2,
    ),
    "router": (
        lambda m, x: softmax(m.r(x), -1) @ m.e,
        {"r": linear(4, 3), "e": numbers(3, 4)},
        {"DW018 r.weight": 4, "DW018 r.bias": 1},
        0,
    ),
    "router top": (
        lambda m, x: softmax(m.r(x), -1) ** 2 @ m.e,
        {"r": linear(4, 3), "e": numbers(3, 4)},
        {"DW018 r.weight": 4, "DW018 r.bias": 1},
        0,
    ),
    "router sigmoid": (lambda m, x: torch.sigmoid(m.r(x)) @ m.e, {"r": linear(4, 3), "e": numbers(3, 4)}, {}, 0),
    "softmax absorbed": (
        lambda m, x: softmax(m.r(x) + m.b, -1) + m.r(x),
        {"r": linear(4, 3), "b": numbers(3)},
        {"DW018 b": 1},
        0,
    ),
    "relative bias and its maximum": (
        lambda m, x: (
            softmax(
                (x @ x.mT)[:, None] + (b := m.b(torch.arange(5)[:, None] - torch.arange(5) + 4).permute(2, 0, 1)), -1
            )
            @ x[:, None]
            + b.amax(-1, keepdim=True)
        ),
        {"b": table(9, 2)},
        {},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), SCORES.values(), ids=list(SCORES))
def test_what_tables_of_scores_may_do(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
