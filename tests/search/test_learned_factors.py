"""A learned factor of what parameters write linearly folds into them (DW011).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, sin, softmax, tanh

from .parts import Buffers, X, numbers

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def lin(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w)


CASES: dict[str, Case] = {
    "number": (lambda m, x: tanh(lin(m, x) * m.s), {"w": numbers(3, 4), "s": torch.randn(())}, {"DW011 s": 1}, 0),
    "number squared": (lambda m, x: tanh(lin(m, x) * m.s * m.s), {"w": numbers(3, 4), "s": torch.randn(())}, {}, 1),
    "number exp": (
        lambda m, x: tanh(lin(m, x) * m.s.exp()),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "number exp exp": (
        lambda m, x: tanh(lin(m, x) * m.s.exp().exp()),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        1,
    ),
    "number 1+exp": (lambda m, x: tanh(lin(m, x) * (1 + m.s.exp())), {"w": numbers(3, 4), "s": torch.randn(())}, {}, 1),
    "number exp(1+)": (
        lambda m, x: tanh(lin(m, x) * (1 + m.s).exp()),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "number 1+": (
        lambda m, x: tanh(lin(m, x) * (m.s + 1)),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "number 1+ read": (
        lambda m, x: tanh(lin(m, x) * (h := (m.s + 1))) + h,
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        0,
    ),
    "number read": (lambda m, x: tanh(lin(m, x) * m.s) + m.s, {"w": numbers(3, 4), "s": torch.randn(())}, {}, 0),
    "number returned": (lambda m, x: (tanh(lin(m, x) * m.s), m.s), {"w": numbers(3, 4), "s": torch.randn(())}, {}, 0),
    "number add alpha": (
        lambda m, x: tanh(lin(m, x) * torch.add(m.s, 1, alpha=2)),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        1,
    ),
    "number sum of two": (
        lambda m, x: tanh(lin(m, x) * (m.s + m.u)),
        {"w": numbers(3, 4), "s": torch.randn(()), "u": torch.randn(())},
        {"DW017 s": 1},
        1,
    ),
    "vector mean": (lambda m, x: tanh(lin(m, x) * m.s.mean()), {"w": numbers(3, 4), "s": numbers(3)}, {}, 3),
    "vector selected": (lambda m, x: tanh(lin(m, x) * m.s[0]), {"w": numbers(3, 4), "s": numbers(3)}, {}, 3),
    "two selected": (
        lambda m, x: tanh(lin(m, x) * m.s[0]) + sin(lin(m, x) * m.s[1]),
        {"w": numbers(3, 4), "s": numbers(3)},
        {},
        2,
    ),
    "number of its own": (
        lambda m, x: tanh((x * m.s).sum(-1, keepdim=True) * m.s),
        {"w": numbers(3, 4), "s": numbers(1)},
        {"DW001 w": 12},
        0,
    ),
    "weight row": (lambda m, x: tanh(lin(m, x) * m.w[:, 0]), {"w": numbers(3, 4)}, {}, 0),
    "integer": (
        lambda m, x: tanh(lin(m, x) * m.s),
        {"w": numbers(3, 4), "s": nn.Parameter(torch.tensor(2), requires_grad=False)},
        {},
        0,
    ),
    "broadcast up": (lambda m, x: tanh(lin(m, x)[:, :1] * m.s), {"w": numbers(3, 4), "s": numbers(5, 1)}, {}, 1),
    "broadcast up data": (
        lambda m, x: tanh(lin(m, x).mean(-1, keepdim=True) * m.s),
        {"w": numbers(3, 4), "s": numbers(3)},
        {},
        9,
    ),
    "product over 2": (
        lambda m, x: tanh(lin(m, x) * m.s) * 2,
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "v bounded": (lambda m, x: tanh(tanh(lin(m, x)) * m.s), {"w": numbers(3, 4), "s": torch.randn(())}, {}, 0),
    "v partly": (lambda m, x: tanh((lin(m, x) + x[..., :3]) * m.s), {"w": numbers(3, 4), "s": torch.randn(())}, {}, 1),
    "v cat data": (
        lambda m, x: tanh(torch.cat([lin(m, x), x], -1) * m.s),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        0,
    ),
    "v read twice": (
        lambda m, x: tanh((h := lin(m, x)) * m.s) + sin(h),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        0,
    ),
    "v scores": (
        lambda m, x: softmax(lin(m, x) @ x[..., :3].mT * m.s, -1) @ x,
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "v scores each head": (
        lambda m, x: (
            softmax(torch.stack([lin(m, x) @ x[..., :3].mT, F.linear(x, m.u) @ x[..., :3].mT], 1) * m.s, -1)
            @ x[:, None]
        ),
        {"w": numbers(3, 4), "s": numbers(2, 1, 1), "u": numbers(3, 4)},
        {"DW011 s": 2},
        0,
    ),
    "v relu": (
        lambda m, x: tanh(torch.relu(lin(m, x)) * m.s),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "kwargs": (
        lambda m, x: tanh(torch.mul(lin(m, x), m.s)),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW011 s": 1},
        0,
    ),
    "claimed before": (
        lambda m, x: softmax(lin(m, x) * m.s + m.s, -1),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW018 w": 4},
        1,
    ),
    "two numbers": (
        lambda m, x: tanh(lin(m, x) * m.s * m.u),
        {"w": numbers(3, 4), "s": torch.randn(()), "u": torch.randn(())},
        {"DW011 s": 1, "DW011 u": 1},
        0,
    ),
    "dead branch": (
        lambda m, x: (tanh(lin(m, x) * m.s), sin(x))[1],
        {"w": numbers(3, 4), "s": torch.randn(())},
        {"DW001 w": 12, "DW001 s": 1},
        0,
    ),
    "number plus data": (
        lambda m, x: tanh(lin(m, x) * (m.s + x.mean())),
        {"w": numbers(3, 4), "s": torch.randn(())},
        {},
        0,
    ),
    "vector plus constant": (
        lambda m, x: tanh(lin(m, x) * (m.s + m.q.u)),
        {"w": numbers(3, 4), "s": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "vector of nothing": (
        lambda m, x: tanh(lin(m, x)[:, :0] * m.s).sum() + x,
        {"w": numbers(3, 4), "s": numbers(3)},
        {},
        15,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_a_learned_factor_folds_into_what_it_multiplies(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
