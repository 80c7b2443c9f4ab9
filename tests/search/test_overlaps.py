"""Single elements that fold, and sums of them that are dead: what two laws claim is counted once.

Where all elements of a bias fold into another and the mean of both is dead, the two biases have one dimension in common
less than the three claims have together. Each case says what the search claims, worked out by hand, and how many
redundant dimensions it leaves unexplained; both are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, sin, softmax, tanh

from deadweight.search.shifts import common_sums

from .parts import Buffers, X, att, linear, ln, matrix, numbers

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def hd(h: Tensor) -> Tensor:
    """Two heads."""
    return h.unflatten(-1, (2, -1))


CASES: dict[str, Case] = {
    "value bias": (
        lambda m, x: ln(att(x, x, m.v(x)) + m.c),
        {"v": linear(), "c": numbers(4)},
        {"DW005 c": 1, "DW005 v.weight": 4, "DW005 v.bias": 1, "DW003 v.bias": 3},
        1,
    ),
    "value bias, softmax": (
        lambda m, x: softmax(att(x, x, m.v(x)) + m.c, -1),
        {"v": linear(), "c": numbers(4)},
        {"DW018 c": 1, "DW018 v.weight": 4, "DW003 v.bias": 4},
        0,
    ),
    "value bias, heads": (
        lambda m, x: ln(hd(att(x, x, m.a(x)) + m.b)),
        {"a": linear(4, 6), "b": numbers(6)},
        {"DW005 b": 2, "DW005 a.weight": 8, "DW005 a.bias": 2, "DW003 a.bias": 4},
        2,
    ),
    "statistics": (
        lambda m, x: ln(m.a(x) - m.q.u.reshape(1, 4) + m.b),
        {"a": linear(), "b": numbers(4), "q": Buffers(u=numbers(4))},
        {"DW004 a.bias": 4, "DW005 b": 1, "DW005 a.weight": 4},
        1,
    ),
    "statistics, softmax": (
        lambda m, x: softmax(m.a(x) - m.q.u.reshape(1, 4) + m.b, -1),
        {"a": linear(), "b": numbers(4), "q": Buffers(u=numbers(4))},
        {"DW018 b": 1, "DW018 a.weight": 4, "DW018 a.bias": 1, "DW004 a.bias": 3},
        0,
    ),
    "statistics, heads": (
        lambda m, x: ln(hd(m.a(x) - m.q.u.reshape(1, 6) + m.b)),
        {"a": linear(4, 6), "b": numbers(6), "q": Buffers(u=numbers(6))},
        {"DW004 a.bias": 6, "DW005 b": 2, "DW005 a.weight": 8},
        2,
    ),
    "statistics, one head": (
        lambda m, x: ln(hd(torch.cat([(h := m.a(x))[..., :3] - m.q.u.reshape(1, 3) + m.b, tanh(h[..., 3:])], -1))),
        {"a": linear(4, 6), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {"DW004 a.bias[0:3]": 3, "DW005 b": 1},
        5,
    ),
    "two biases": (
        lambda m, x: ln(m.a(x) + m.b),
        {"a": linear(), "b": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 b": 3, "DW014 a.weight": 1},
        0,
    ),
    "two biases, heads": (
        lambda m, x: ln(hd(m.a(x) + m.b)),
        {"a": linear(4, 6), "b": numbers(6)},
        {"DW005 b": 2, "DW005 a.weight": 8, "DW005 a.bias": 2, "DW017 b": 4, "DW014 a.weight": 2},
        0,
    ),
    "two biases, a part": (
        lambda m, x: tanh(m.r((h := m.a(x))[..., :2])) + ln(h[..., 2:] + m.b),
        {"a": linear(4, 6), "b": numbers(4), "r": matrix(2, 4)},
        {
            "DW005 b": 1,
            "DW005 a.weight[2:6]": 4,
            "DW005 a.bias[2:6]": 1,
            "DW017 a.bias[2:6]": 3,
            "DW019 a.weight[0:2]": 4,
            "DW014 a.weight": 1,
        },
        0,
    ),
    "norm shift": (
        lambda m, x: ln(ln(x) * m.g + m.b + m.a(sin(x))),
        {"a": linear(), "b": numbers(4), "g": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 a.bias": 3, "DW014 g": 1},
        0,
    ),
    "mean dead in softmax and in LayerNorm": (
        lambda m, x: ln(h := m.a(x)) + softmax(h, -1),
        {"a": linear()},
        {"DW018 a.weight": 4, "DW018 a.bias": 1},
        0,
    ),
    "heads dead in softmax and in LayerNorm": (
        lambda m, x: ln(h := hd(m.a(x))) + softmax(h, -1),
        {"a": linear(4, 6)},
        {"DW018 a.weight": 4, "DW018 a.bias": 1, "DW005 a.bias": 1},
        4,
    ),
    "dead in softmax and in LayerNorm": (
        lambda m, x: softmax((h := m.a(x))[..., :2], 1) + ln(h[..., :2].mT).mT + tanh(h[..., 2:]),
        {"a": linear()},
        {"DW018 a.bias[0:2]": 2},
        0,
    ),
    "dead mean, taken over on one way": (
        lambda m, x: ln(h := m.a(x)) + sin(ln(h + m.c)),
        {"a": linear(), "c": numbers(4)},
        {"DW005 c": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW014 a.weight": 1},
        0,
    ),
    "a part folds, a mean folds": (
        lambda m, x: tanh((h := m.a(x))[..., :3] + m.b) + ln(h[..., 3:]) + sin(h[..., 3:] + m.c),
        {"a": linear(4, 6), "b": numbers(3), "c": numbers(3)},
        {"DW017 a.bias[0:3]": 3},
        1,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_what_folds_and_is_dead_in_sum_is_counted_once(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ([1, 2, 3, 4], [1, 1, 2, 2], 2),
        ([1, 2, 3, 0], [1, 1, 2, 2], 1),
        ([1, 1, 2, 2], [1, 2, 2, 1], 1),
        ([1, 1, 2, 2, 3], [1, 2, 2, 3, 3], 1),
        ([1, 1, 2, 2, 0], [1, 2, 2, 3, 3], 0),
        ([1, 1, 0, 0], [0, 0, 1, 1], 0),
    ],
)
def test_sums_in_common_are_sets_of_whole_groups_of_both(one: list[int], other: list[int], count: int) -> None:
    assert common_sums(torch.tensor(one), torch.tensor(other)) == count
    assert common_sums(torch.tensor(other), torch.tensor(one)) == count
