"""Factors per channel behind a linear map (DW011), with stored statistics between them (DW004).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, sin, tanh

from .parts import Buffers, X, Y, numbers

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def lin(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w)


LINEAR: dict[str, Case] = {
    "factor": (lambda m, x: tanh(lin(m, x) * m.g), {"w": numbers(3, 4), "g": numbers(3)}, {"DW011 g": 3}, 0),
    "factor left": (lambda m, x: tanh(m.g * lin(m, x)), {"w": numbers(3, 4), "g": numbers(3)}, {"DW011 g": 3}, 0),
    "factor bias": (
        lambda m, x: tanh((lin(m, x) + m.b) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor of data": (
        lambda m, x: tanh(lin(m, x) * sin(x[..., :3])),
        {"w": numbers(3, 4), "g": numbers(3)},
        {"DW001 g": 3},
        0,
    ),
    "factor and data": (
        lambda m, x: tanh(lin(m, x) * (m.g * x[:1, :1, :3])),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        3,
    ),
    "factor per place": (lambda m, x: tanh(lin(m, x) * m.g), {"w": numbers(3, 4), "g": numbers(5, 1)}, {}, 1),
    "factor per place square": (
        lambda m, x: tanh(F.linear(x[:, :3], m.w) * m.g),
        {"w": numbers(3, 4), "g": numbers(3, 1)},
        {},
        1,
    ),
    "factor matrix": (lambda m, x: tanh(lin(m, x) * m.g), {"w": numbers(3, 4), "g": numbers(5, 3)}, {}, 3),
    "factor one": (lambda m, x: tanh(lin(m, x) * m.g), {"w": numbers(3, 4), "g": numbers(1)}, {"DW011 g": 1}, 0),
    "factor bias one": (
        lambda m, x: tanh((lin(m, x) + m.b) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(1)},
        {},
        1,
    ),
    "factor bias matrix": (
        lambda m, x: tanh((lin(m, x) + m.b) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(5, 3)},
        {"DW011 g": 3},
        0,
    ),
    "factor bias places": (
        lambda m, x: tanh((F.linear(x[:, :3], m.w) + m.b) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3, 1)},
        {},
        1,
    ),
    "factor bias elsewhere": (
        lambda m, x: tanh((lin(m, x) + m.b) * m.g) + sin(m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        0,
    ),
    "factor bias computed": (
        lambda m, x: tanh((lin(m, x) + sin(m.b)) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        3,
    ),
    "factor bias view": (
        lambda m, x: tanh((lin(m, x) + m.b.reshape(1, 3)) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor bias view elsewhere": (
        lambda m, x: tanh((lin(m, x) + (v := m.b.reshape(1, 3))) * m.g) + sin(v),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        0,
    ),
    "factor bias alpha": (
        lambda m, x: tanh(torch.add(lin(m, x), m.b, alpha=2) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor bias sub": (
        lambda m, x: tanh((lin(m, x) - m.b) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor bias minus": (
        lambda m, x: tanh((m.b - lin(m, x)) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor elsewhere": (lambda m, x: tanh(lin(m, x) * m.g) + sin(m.g), {"w": numbers(3, 4), "g": numbers(3)}, {}, 0),
    "factor map read": (
        lambda m, x: tanh((h := lin(m, x)) * m.g) + sin(h),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        0,
    ),
    "factor weight read": (
        lambda m, x: tanh(lin(m, x) * m.g) + m.w.sum(),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        2,
    ),
    "factor weight twice": (
        lambda m, x: tanh(lin(m, x) * m.g) + sin(lin(m, sin(x))),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        0,
    ),
    "factor weight T": (
        lambda m, x: tanh(F.linear(x[..., :3], m.w.T) * m.g),
        {"w": numbers(3, 4), "g": numbers(4)},
        {"DW011 g": 4},
        0,
    ),
    "factor sum read": (
        lambda m, x: tanh((h := (lin(m, x) + m.b)) * m.g) + sin(h),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        0,
    ),
    "factor data added": (
        lambda m, x: tanh((lin(m, x) + x[..., :3]) * m.g),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        3,
    ),
    "factor number": (lambda m, x: tanh(lin(m, x) * 2 * m.g), {"w": numbers(3, 4), "g": numbers(3)}, {"DW011 g": 3}, 0),
    "factor number added": (lambda m, x: tanh((lin(m, x) + 2) * m.g), {"w": numbers(3, 4), "g": numbers(3)}, {}, 0),
    "factor number added shift": (
        lambda m, x: tanh((lin(m, x) + 2) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        3,
    ),
    "factor buffers": (
        lambda m, x: tanh((lin(m, x) - m.q.u) / m.q.v * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3), v=numbers(3))},
        {"DW004 g": 3},
        0,
    ),
    "factor buffers no shift": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
    "factor buffers shift alpha": (
        lambda m, x: tanh(torch.add((lin(m, x) - m.q.u) * m.g, m.b, alpha=2)),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor buffers shift matrix": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(5, 3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor buffers shift one": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(1), "q": Buffers(u=numbers(3))},
        {},
        1,
    ),
    "factor buffers shift elsewhere": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b) + sin(m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
    "factor buffers product read": (
        lambda m, x: tanh((h := ((lin(m, x) - m.q.u) * m.g)) + m.b) + sin(h),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
    "factor buffers returned": (
        lambda m, x: (tanh((h := ((lin(m, x) - m.q.u) * m.g)) + m.b), h),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
    "factor buffers minus": (
        lambda m, x: tanh((m.q.u - lin(m, x)) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor buffers over": (
        lambda m, x: tanh(m.q.u / lin(m, x) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor buffers per place": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(5, 1))},
        {},
        0,
    ),
    "factor buffers matrix": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(5, 3))},
        {},
        0,
    ),
    "factor buffers alpha": (
        lambda m, x: tanh(torch.sub(lin(m, x), m.q.u, alpha=3) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor buffers one": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(1))},
        {"DW004 g": 3},
        0,
    ),
    "factor divide by param": (
        lambda m, x: tanh(lin(m, x) / m.b * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 g": 3},
        3,
    ),
    "factor two factors": (
        lambda m, x: tanh(lin(m, x) * m.b * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {"DW011 b": 3, "DW011 g": 3},
        0,
    ),
    "factor 1+g": (lambda m, x: tanh(lin(m, x) * (1 + m.g)), {"w": numbers(3, 4), "g": numbers(3)}, {"DW011 g": 3}, 0),
    "factor exp": (lambda m, x: tanh(lin(m, x) * m.g.exp()), {"w": numbers(3, 4), "g": numbers(3)}, {"DW011 g": 3}, 0),
    "factor sin": (lambda m, x: tanh(lin(m, x) * m.g.sin()), {"w": numbers(3, 4), "g": numbers(3)}, {}, 3),
    "shift subtracted": (
        lambda m, x: tanh(m.b - (lin(m, x) - m.q.u) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        3,
    ),
    "factor twice product": (
        lambda m, x: tanh((h := lin(m, x)) * h * m.g),
        {"w": numbers(3, 4), "g": numbers(3)},
        {},
        3,
    ),
    "unused result": (
        lambda m, x: (lin(m, x) * m.g, tanh(x))[1],
        {"w": numbers(3, 4), "g": numbers(3)},
        {"DW001 w": 12, "DW001 g": 3},
        0,
    ),
    "factor returned": (
        lambda m, x: lin(m, x) * m.g,
        {"w": numbers(3, 4), "g": numbers(3)},
        {"DW011 g": 3},
        0,
    ),
    "factor constant first": (
        lambda m, x: tanh((m.q.u + lin(m, x)) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3))},
        {"DW011 g": 3},
        0,
    ),
    "factor maximum": (
        lambda m, x: tanh(torch.maximum(lin(m, x), m.q.u) * m.g),
        {"w": numbers(3, 4), "g": numbers(3), "q": Buffers(u=torch.tensor([0.1, -0.1, 0.2]))},
        {},
        0,
    ),
    "factor buffers per place square": (
        lambda m, x: tanh((F.linear(x[:, :3], m.w) - m.q.u) * m.g + m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3), "q": Buffers(u=numbers(3, 1))},
        {},
        0,
    ),
    "factor bias view read between": (
        lambda m, x: tanh((lin(m, x) + (v := m.b.reshape(1, 3)).unsqueeze(0)) * m.g) + sin(v),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        0,
    ),
    "factor bias behind a view elsewhere": (
        lambda m, x: tanh((lin(m, x) + m.b.reshape(1, 3)) * m.g) + sin(m.b),
        {"w": numbers(3, 4), "g": numbers(3), "b": numbers(3)},
        {},
        0,
    ),
    "factor buffers shift number": (
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + 2),
        {"w": numbers(3, 4), "g": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
    "factor buffers shift itself": (
        lambda m, x: tanh((h := (lin(m, x) - m.q.u) * m.g) + h),
        {"w": numbers(3, 4), "g": numbers(3), "q": Buffers(u=numbers(3))},
        {},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), LINEAR.values(), ids=list(LINEAR))
def test_a_factor_per_channel_folds_into_the_map_before_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


CONVOLUTIONS: dict[str, Case] = {
    "conv": (lambda m, y: tanh(m.c(y) * m.g), {"c": nn.Conv1d(4, 3, 1), "g": numbers(3, 1)}, {"DW011 g": 3}, 0),
    "conv places": (lambda m, y: tanh(m.c(y) * m.g), {"c": nn.Conv1d(4, 3, 1), "g": numbers(6)}, {}, 1),
    "conv groups": (
        lambda m, y: tanh(m.c(y) * m.g),
        {"c": nn.Conv1d(4, 4, 1, groups=2), "g": numbers(4, 1)},
        {"DW011 g": 4},
        0,
    ),
    "conv bn": (
        lambda m, y: tanh(m.n(m.c(y))),
        {"c": nn.Conv1d(4, 3, 1), "n": nn.BatchNorm1d(3)},
        {"DW004 c.bias": 3, "DW004 n.weight": 3},
        0,
    ),
    "conv bn noaffine": (
        lambda m, y: tanh(m.n(m.c(y))),
        {"c": nn.Conv1d(4, 3, 1), "n": nn.BatchNorm1d(3, affine=False)},
        {},
        0,
    ),
    "conv unbatched": (lambda m, y: tanh(m.c(y[0]) * m.g), {"c": nn.Conv1d(4, 3, 1), "g": numbers(3, 1)}, {}, 3),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CONVOLUTIONS.values(), ids=list(CONVOLUTIONS))
def test_a_factor_per_channel_folds_into_the_convolution_before_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, Y, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


def test_a_factor_names_what_takes_up_its_scale_and_where_the_change_ends(census: Callable) -> None:
    """A shift behind the product takes part only if a constant stands before it."""
    plain = census(lambda m, x: tanh(lin(m, x) * m.g + m.b), X, w=numbers(3, 4), g=numbers(3), b=numbers(3))
    shifted = census(
        lambda m, x: tanh((lin(m, x) - m.q.u) * m.g + m.b),
        X,
        w=numbers(3, 4),
        g=numbers(3),
        b=numbers(3),
        q=Buffers(u=numbers(3)),
    )
    taken = [[counted.graph.parameters[name] for name in counted.claims[0].into] for counted in (plain, shifted)]
    assert taken == [["w"], ["w", "b"]]
    ends = [[s.op for s in counted.claims[0].steps if s.value is None] for counted in (plain, shifted)]
    assert ends == [["aten.mul"], ["aten.add"]]
