"""Two parameters that act on one value alike are one (DW017), and what is missing where they are not.

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

from .parts import X, numbers

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


CASES: dict[str, Case] = {
    "mul": (lambda m, x: tanh(m.a * x + x * m.b), {"a": numbers(4), "b": numbers(4)}, {"DW017 a": 4}, 0),
    "mul alpha": (
        lambda m, x: tanh(torch.add(m.a * x, x * m.b, alpha=2)),
        {"a": numbers(4), "b": numbers(4)},
        {"DW017 a": 4},
        0,
    ),
    "mul alpha0": (lambda m, x: tanh(torch.add(m.a * x, x * m.b, alpha=0)), {"a": numbers(4), "b": numbers(4)}, {}, 4),
    "sub alpha": (
        lambda m, x: tanh(torch.sub(m.a * x, x * m.b, alpha=2)),
        {"a": numbers(4), "b": numbers(4)},
        {"DW017 a": 4},
        0,
    ),
    "other value": (lambda m, x: tanh(m.a * x + sin(x) * m.b), {"a": numbers(4), "b": numbers(4)}, {}, 0),
    "read twice": (lambda m, x: tanh(m.a * x + (h := (x * m.b))) + sin(h), {"a": numbers(4), "b": numbers(4)}, {}, 0),
    "param elsewhere": (lambda m, x: tanh(m.a * x + x * m.b) + sin(m.b), {"a": numbers(4), "b": numbers(4)}, {}, 0),
    "view elsewhere": (
        lambda m, x: tanh(m.a.reshape(1, 4) * x + x * (v := m.b.reshape(1, 4))) + sin(v),
        {"a": numbers(4), "b": numbers(4)},
        {},
        0,
    ),
    "views": (
        lambda m, x: tanh(m.a.reshape(1, 4) * x + x * m.b.reshape(1, 4)),
        {"a": numbers(4), "b": numbers(4)},
        {"DW017 a": 4},
        0,
    ),
    "other views": (
        lambda m, x: tanh(m.a.reshape(1, 4) * x + x * m.b.reshape(4)),
        {"a": numbers(4), "b": numbers(1, 4)},
        {},
        4,
    ),
    "other shapes one way": (
        lambda m, x: tanh(m.a.reshape(2, 2).reshape(4) * x + x * m.b.reshape(2, 2).reshape(4)),
        {"a": numbers(4), "b": numbers(1, 4)},
        {"DW017 a": 4},
        0,
    ),
    "select": (lambda m, x: tanh(m.a[0] * x + x * m.b[1]), {"a": numbers(2, 4), "b": numbers(2, 4)}, {}, 12),
    "select same": (
        lambda m, x: tanh(m.a[0] * x + x * m.b[0]),
        {"a": numbers(2, 4), "b": numbers(2, 4)},
        {"DW017 a": 8},
        4,
    ),
    "sin of the other": (lambda m, x: tanh(m.a * x + x * sin(m.b)), {"a": numbers(4), "b": numbers(4)}, {}, 4),
    "one parameter": (lambda m, x: tanh(m.a * x + x * m.a), {"a": numbers(4)}, {}, 0),
    "the value is a parameter": (
        lambda m, x: tanh(x + (m.a * m.b + m.b * m.c)),
        {"a": numbers(4), "b": numbers(4), "c": numbers(4)},
        {"DW017 a": 4},
        4,
    ),
    "value is itself the other": (
        lambda m, x: tanh(x + (m.a * m.b + m.b * m.b)),
        {"a": numbers(4), "b": numbers(4)},
        {},
        4,
    ),
    "returned product": (lambda m, x: (tanh((h := (m.a * x)) + x * m.b), h), {"a": numbers(4), "b": numbers(4)}, {}, 0),
    "returned parameter": (lambda m, x: (tanh(m.a * x + x * m.b), m.b), {"a": numbers(4), "b": numbers(4)}, {}, 0),
    "linear": (
        lambda m, x: tanh(F.linear(x, m.a) + F.linear(x, m.b)),
        {"a": numbers(3, 4), "b": numbers(3, 4)},
        {"DW020 b": 12},
        0,
    ),
    "linear and factor": (
        lambda m, x: tanh(F.linear(x, m.a) + x * m.b),
        {"a": numbers(4, 4), "b": numbers(4)},
        {"DW020 b": 4},
        0,
    ),
    "integer": (
        lambda m, x: tanh(m.a * x + x * m.b),
        {"a": numbers(4), "b": nn.Parameter(torch.arange(4), requires_grad=False)},
        {},
        0,
    ),
    "three adds": (lambda m, x: tanh(m.a * x + x * m.b + 1.0), {"a": numbers(4), "b": numbers(4)}, {"DW017 a": 4}, 0),
    "stacked add": (
        lambda m, x: tanh(m.a * x + m.b * x + m.c * x),
        {"a": numbers(4), "b": numbers(4), "c": numbers(4)},
        {"DW017 a": 4},
        4,
    ),
    "dead branch": (lambda m, x: tanh(x) + 0 * 0, {"a": numbers(4), "b": numbers(4)}, {"DW001 a": 4, "DW001 b": 4}, 0),
    "claimed before": (
        lambda m, x: softmax((m.a * x).sum(-1) + (x * m.b).sum(-1), -1),
        {"a": numbers(4), "b": numbers(4)},
        {},
        4,
    ),
    "claimed dead first": (
        lambda m, x: softmax(x.mean() + (m.a * sin(x.mean()) + sin(x.mean()) * m.b).expand(2, 5), -1),
        {"a": numbers(1), "b": numbers(1)},
        {"DW018 a": 1, "DW018 b": 1},
        0,
    ),
    "both in softmax": (
        lambda m, x: softmax(x + (m.a * (s := x.mean(-1, keepdim=True)) + s * m.b), -1),
        {"a": numbers(1), "b": numbers(1)},
        {"DW018 a": 1, "DW018 b": 1},
        0,
    ),
    "sines of both": (
        lambda m, x: tanh(sin(m.a) * x + sin(m.b) * x),
        {"a": numbers(4), "b": numbers(4)},
        {},
        4,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_parameters_that_act_alike_on_one_value_are_one(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
