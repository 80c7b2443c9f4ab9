"""Readers of single channels: which turns of the stream they do not see (DW012).

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import sin, tanh

from .parts import X, ln, matrix, numbers, rms

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


CASES: dict[str, Case] = {
    "slice twice": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 3)},
        {"DW012 a.weight": 4, "DW014 a.weight": 1},
        0,
    ),
    "slice one row": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW012 a.weight": 8, "DW014 a.weight": 1},
        0,
    ),
    "slice gain": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s((rms(h) * m.g)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1), "g": numbers(5)},
        {"DW006 g": 5, "DW012 a.weight": 4, "DW014 a.weight": 1},
        4,
    ),
    "slice with gain inside": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h)[..., :3] * m.g)),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1), "g": numbers(3)},
        {"DW012 a.weight": 1, "DW014 a.weight": 1, "DW011 g": 3},
        7,
    ),
    "overlap": (
        lambda m, x: (
            tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h)[..., :3])) + tanh(m.t(rms(h)[..., 2:]))
        ),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1), "t": matrix(3, 1)},
        {"DW012 a.weight": 2, "DW014 a.weight": 1},
        4,
    ),
    "two copies": (
        lambda m, x: (
            tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(torch.cat([rms(h)[..., :3], sin(x)[..., :1]], -1)))
        ),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(4, 1)},
        {"DW012 a.weight": 8, "DW014 a.weight": 1},
        0,
    ),
    "cat two slices": (
        lambda m, x: (
            tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(torch.cat([rms(h)[..., :3], rms(h)[..., :2]], -1)))
        ),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(5, 1)},
        {"DW012 a.weight": 5, "DW014 a.weight": 1},
        5,
    ),
    "narrow writers": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x[..., :1]) + m.b(sin(x[..., :1])))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(1, 5), "b": matrix(1, 5), "r": matrix(5, 1), "s": matrix(3, 1)},
        {"DW012 a.weight": 4, "DW014 a.weight": 1},
        7,
    ),
    "relu slice": (
        lambda m, x: tanh(m.r(h := torch.relu(m.a(x)))) + tanh(m.s(h[..., :3])),
        {"a": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW011 a.weight": 5},
        0,
    ),
    "no norm slice": (
        lambda m, x: tanh(m.r(h := (m.a(x) + m.b(sin(x))))) + tanh(m.s(h[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW019 a.weight": 13},
        13,
    ),
    "ln slice": (
        lambda m, x: tanh(m.r(ln(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(ln(h)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 5), "s": matrix(3, 1)},
        {"DW005 a.weight": 4, "DW005 b.weight": 4, "DW008 r.weight": 5, "DW012 a.weight": 4, "DW014 a.weight": 1},
        1,
    ),
    "behind gain write slice": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.g * m.b(sin(x)))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1), "g": numbers(5)},
        {"DW011 g": 5, "DW012 a.weight": 4, "DW014 a.weight": 1},
        4,
    ),
    "partial writer": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + F.pad(m.b(sin(x)), (0, 2)))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 3), "r": matrix(5, 3), "s": matrix(3, 1)},
        {},
        5,
    ),
    "pointwise & slice": (
        lambda m, x: tanh(m.r(rms(h := m.a(x)))) + tanh(m.s(rms(h)[..., :3])) + (rms(h) * m.g).sum(),
        {"a": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1), "g": numbers(5)},
        {"DW014 a.weight": 1},
        13,
    ),
    "normed slice": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h[..., :3]))),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW014 a.weight": 1},
        4,
    ),
    "two norms of halves": (
        lambda m, x: (
            tanh(m.r(rms(h := (m.a(x) + m.b(sin(x)))))) + tanh(m.s(rms(h.unflatten(-1, (2, 3))).flatten(-2)[..., :3]))
        ),
        {"a": matrix(4, 6), "b": matrix(4, 6), "r": matrix(6, 3), "s": matrix(3, 1)},
        {"DW014 a.weight": 1},
        6,
    ),
    "slice times zero": (
        lambda m, x: (
            tanh(m.r(rms(h := (m.a(x) + m.b(sin(x))))))
            + tanh(m.s(torch.cat([rms(h)[..., :3] * 0, sin(x)[..., :1]], -1)))
        ),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(4, 1)},
        {"DW012 a.weight": 8, "DW014 a.weight": 1},
        5,
    ),
    "narrow writers, wide slice": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x[..., :1]) + m.b(sin(x[..., :1])))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(1, 5), "b": matrix(1, 5), "r": matrix(5, 1), "s": matrix(3, 2)},
        {"DW012 a.weight": 4, "DW014 a.weight": 1},
        8,
    ),
    "narrow writers, wide reader": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x[..., :1]) + m.b(sin(x[..., :1])))))) + tanh(m.s(rms(h)[..., :3])),
        {"a": matrix(1, 5), "b": matrix(1, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW012 a.weight": 8, "DW014 a.weight": 1},
        9,
    ),
    "no norm, slice behind a factor": (
        lambda m, x: tanh(m.r(h := (m.a(x) + m.b(sin(x))) * 2)) + tanh(m.s(h[..., :3])),
        {"a": matrix(4, 5), "b": matrix(4, 5), "r": matrix(5, 3), "s": matrix(3, 1)},
        {"DW019 a.weight": 13},
        13,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), CASES.values(), ids=list(CASES))
def test_readers_of_a_slice_leave_the_turns_that_they_do_not_see(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
