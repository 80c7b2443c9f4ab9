"""Spaces: which parameters write a vector, which read it, and what stands in the way of another basis.

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

from .parts import Buffers, T, X, linear, ln, matrix, numbers, rms, table

Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


STREAMS: dict[str, Case] = {
    "tied linear in the stream": (
        lambda m, x: F.linear(ln(m.a(x) + F.linear(sin(x), m.w)) * m.g, m.w),
        {"a": linear(), "w": numbers(4, 4), "g": numbers(4)},
        {"DW005 a.weight": 4, "DW005 a.bias": 1},
        2,
    ),
    "tied linear both writers": (
        lambda m, x: tanh(ln(F.linear(x, m.w) + F.linear(sin(x), m.w))),
        {"w": numbers(4, 4)},
        {"DW005 w": 4, "DW014 w": 1},
        0,
    ),
    "tied linear transposed writer": (
        lambda m, x: tanh(ln(F.linear(x, m.w) + F.linear(sin(x), m.w.T))),
        {"w": numbers(4, 4)},
        {},
        2,
    ),
    "tied linear read": (
        lambda m, x: tanh(ln(F.linear(x, m.w) + m.a(x))) + sin(F.linear(x, m.w)),
        {"w": numbers(4, 4), "a": linear()},
        {"DW005 a.weight": 4, "DW005 a.bias": 1},
        1,
    ),
    "weight reads itself": (
        lambda m, x: tanh(ln(F.linear(m.w, m.w) + m.a(x[:, :4]))),
        {"w": numbers(4, 4), "a": linear()},
        {"DW005 a.weight": 4, "DW005 a.bias": 1},
        11,
    ),
    "narrow writer": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(x).repeat(1, 1, 2)))),
        {"a": linear(4, 4), "b": linear(4, 2), "r": matrix(4, 3)},
        {"DW017 b.bias": 2, "DW014 a.weight": 1},
        14,
    ),
    "int param added": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.p))),
        {"a": matrix(4, 4), "p": nn.Parameter(torch.arange(4), requires_grad=False), "r": matrix(4, 3)},
        {},
        3,
    ),
    "scalar param added": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.p))),
        {"a": matrix(4, 4), "p": torch.randn(()), "r": matrix(4, 3)},
        {},
        4,
    ),
    "reshaped bias": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.p.reshape(1, 4)))),
        {"a": matrix(4, 4), "p": numbers(2, 2), "r": matrix(4, 3)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "bias in two orders": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.p.reshape(1, 4)))) + sin(m.p.mT.reshape(1, 4) + x).sum(-1, True),
        {"a": matrix(4, 4), "p": numbers(2, 2), "r": matrix(4, 3)},
        {},
        3,
    ),
    "reshaped bias 2": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.c(sin(x)) + m.p.reshape(1, 4)))),
        {"a": matrix(4, 4), "c": matrix(4, 4), "p": numbers(4), "r": matrix(4, 3)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "product of data": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(x) * m.c(x)))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4), "r": matrix(4, 3)},
        {},
        5,
    ),
    "times number of each vector": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(x) * x.mean(-1, keepdim=True)))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind gain": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.g))),
        {"a": matrix(4, 4), "b": linear(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind gain two writers": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (m.b(sin(x)) + m.c(x * x)) * m.g))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "c": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4},
        7,
    ),
    "behind gain alpha": (
        lambda m, x: tanh(m.r(rms(m.a(x) + torch.add(F.linear(sin(x), m.b), m.c, alpha=2) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4},
        7,
    ),
    "behind gain place bias": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(5, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4},
        7,
    ),
    "behind gain buffer": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c.u) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": Buffers(u=numbers(4)), "r": matrix(4, 3), "g": numbers(4)},
        {},
        7,
    ),
    "behind gain number": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + 1) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {},
        7,
    ),
    "behind gain bias twice": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c) * m.g + m.c))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(4), "r": matrix(4, 3), "g": numbers(4)},
        {},
        11,
    ),
    "behind gain permuted": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)).flip(-1) * m.g))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4},
        7,
    ),
    "behind gain shared gain": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.g))) + sin(m.g).sum(),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        3,
    ),
    "norm gain writes": (
        lambda m, x: tanh(m.r(rms(m.a(x) + rms(x) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW014 a.weight": 1},
        0,
    ),
    "norm gain of two norms": (
        lambda m, x: tanh(m.r(rms(m.a(x) + rms(x) * m.g + rms(x * x) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW014 a.weight": 1},
        0,
    ),
    "norm gain and other product": (
        lambda m, x: tanh(m.r(rms(m.a(x) + rms(x) * m.g + tanh(x) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {},
        1,
    ),
    "norm gain and sum": (
        lambda m, x: tanh(m.r(rms(m.a(x) + rms(x) * m.g))) + (rms(sin(x)) + m.g),
        {"a": matrix(4, 4), "r": matrix(4, 4), "g": numbers(4)},
        {},
        0,
    ),
    "scalar: ln before ln": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * m.g + m.b)),
        {"a": linear(), "g": numbers(4), "b": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 b": 3, "DW014 a.weight": 1},
        0,
    ),
    "scalar: 1+w gain": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * (1 + m.g) + m.b)),
        {"a": linear(), "g": numbers(4), "b": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 b": 3, "DW014 a.weight": 1},
        0,
    ),
    "scalar: alpha gain": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * torch.add(m.g, 1, alpha=2) + m.b)),
        {"a": linear(), "g": numbers(4), "b": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 b": 3},
        1,
    ),
    "scalar: gain sums read": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * (h := (1 + m.g)) + m.b)) + h,
        {"a": linear(), "g": numbers(4), "b": numbers(4)},
        {"DW005 b": 1, "DW005 a.weight": 4, "DW005 a.bias": 1, "DW017 b": 3},
        0,
    ),
    "scalar: gain of 2 channels": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * m.g.repeat_interleave(2))),
        {"a": linear(), "g": numbers(2)},
        {"DW005 a.weight": 4, "DW005 a.bias": 1},
        1,
    ),
    "scalar: gain expand": (
        lambda m, x: tanh(ln(m.a(x) + ln(x) * m.g.expand(4))),
        {"a": linear(), "g": numbers(1)},
        {"DW005 a.weight": 4, "DW005 a.bias": 1},
        1,
    ),
    "int bias": (
        lambda m, x: tanh(m.a(x) + m.p),
        {"p": nn.Parameter(torch.arange(4), requires_grad=False), "a": linear()},
        {},
        0,
    ),
    "behind gain 2 biases": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c + m.d) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(4), "d": numbers(4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW017 c": 4, "DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind gain same bias twice": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c + m.c) * m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW011 g": 4},
        7,
    ),
    "behind gain that is used twice": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c) * m.g))) + sin(m.g),
        {"a": matrix(4, 4), "b": numbers(4, 4), "c": numbers(4), "r": matrix(4, 4), "g": numbers(4)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind gain that is a bias": (
        lambda m, x: tanh(m.r(rms(m.a(x) + F.linear(sin(x), m.b) * m.g + m.g))),
        {"a": matrix(4, 4), "b": numbers(4, 4), "r": matrix(4, 4), "g": numbers(4)},
        {},
        7,
    ),
    "bias is factor": (
        lambda m, x: tanh(m.r(h := (m.a(x) + m.c))) + (h * m.c).sum(-1, keepdim=True),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 3)},
        {},
        12,
    ),
    "bias is factor2": (
        lambda m, x: tanh(m.r((m.a(x) + m.c) * m.c)),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 3)},
        {"DW011 a.weight": 4},
        13,
    ),
    "bias is gain of norm": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.c) * m.c)),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 3)},
        {"DW014 a.weight": 1},
        6,
    ),
    "bias is shift of norm": (
        lambda m, x: tanh(m.r(ln(m.a(x) + m.c) + m.c)),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 3)},
        {"DW005 a.weight": 4, "DW012 a.weight": 3},
        2,
    ),
    "relu bias is reader bias": (
        lambda m, x: tanh(m.r(torch.relu(m.a(x) + m.c)) + m.c),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 4)},
        {},
        0,
    ),
    "weight writes & reads": (
        lambda m, x: tanh(F.linear(torch.relu(F.linear(x, m.w)), m.w)),
        {"w": numbers(4, 4)},
        {},
        0,
    ),
    "weight writes & reads T": (
        lambda m, x: tanh(F.linear(torch.relu(F.linear(x, m.w)), m.w.T)),
        {"w": numbers(4, 4)},
        {},
        0,
    ),
    "weight lin T": (lambda m, x: tanh(F.linear(F.linear(x, m.w), m.w.T)), {"w": numbers(3, 4)}, {}, 3),
    "weight lin": (lambda m, x: tanh(F.linear(F.linear(x, m.w), m.w)), {"w": numbers(4, 4)}, {}, 0),
    "qk tied": (lambda m, x: softmax(F.linear(x, m.w) @ F.linear(sin(x), m.w).mT, -1) @ x, {"w": numbers(4, 4)}, {}, 6),
    "qk tied T": (
        lambda m, x: softmax(F.linear(x, m.w) @ F.linear(sin(x), m.w.T).mT, -1) @ x,
        {"w": numbers(4, 4)},
        {},
        0,
    ),
    "qk bias tied": (
        lambda m, x: softmax((F.linear(x, m.w) + m.b) @ (F.linear(sin(x), m.v) + m.b).mT, -1) @ x,
        {"w": numbers(4, 4), "v": numbers(4, 4), "b": numbers(4)},
        {},
        16,
    ),
    "v o tied": (
        lambda m, x: tanh(F.linear(softmax(x @ x.mT, -1) @ F.linear(sin(x), m.w), m.w)),
        {"w": numbers(4, 4)},
        {},
        0,
    ),
    "v o tied T": (
        lambda m, x: tanh(F.linear(softmax(x @ x.mT, -1) @ F.linear(sin(x), m.w), m.w.T)),
        {"w": numbers(3, 4)},
        {},
        3,
    ),
    "v bias is o bias": (
        lambda m, x: tanh(F.linear(softmax(x @ x.mT, -1) @ (F.linear(sin(x), m.w) + m.b), m.o) + m.b),
        {"w": numbers(4, 4), "o": numbers(4, 4), "b": numbers(4)},
        {},
        16,
    ),
    "k bias is q bias": (
        lambda m, x: softmax((F.linear(x, m.w) + m.b) @ (F.linear(sin(x), m.v) + m.b).mT, -1) @ x,
        {"w": numbers(4, 4), "v": numbers(4, 4), "b": numbers(4)},
        {},
        16,
    ),
    "stream twice": (
        lambda m, x: tanh(m.r(rms(h := (m.a(x) + m.c)))) + m.r(rms(tanh(h))),
        {"a": matrix(4, 4), "c": numbers(4), "r": matrix(4, 3)},
        {},
        0,
    ),
    "stream write back": (
        lambda m, x: tanh(m.r(rms((h := m.a(x)) + m.b(rms(h))))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "stream write back same": (
        lambda m, x: tanh(m.r(rms((h := m.a(x)) + m.b(m.b(rms(h)))))),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3)},
        {"DW012 a.weight": 6},
        1,
    ),
    "gain shared": (
        lambda m, x: tanh(m.r(rms((h := m.a(x)) + m.b(rms(h) * m.g)) * m.g)),
        {"a": matrix(4, 4), "b": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW012 a.weight": 6, "DW014 a.weight": 1},
        4,
    ),
    "ln shift shared": (
        lambda m, x: tanh(m.r(ln((h := m.a(x)) + m.b(ln(h) + m.g)) + m.g)),
        {"a": matrix(4, 4), "b": linear(4, 4), "r": linear(4, 3), "g": numbers(4)},
        {
            "DW005 a.weight": 4,
            "DW005 b.weight": 4,
            "DW005 b.bias": 1,
            "DW006 g": 4,
            "DW008 b.weight": 3,
            "DW008 r.weight": 3,
            "DW012 a.weight": 3,
            "DW014 a.weight": 1,
        },
        0,
    ),
    "behind: bias is gain": (
        lambda m, x: tanh(m.r(rms(m.a(x) + F.linear(sin(x), m.b) * m.g + m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": numbers(4, 4), "g": numbers(4)},
        {},
        7,
    ),
    "behind: gain": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind: read before": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (h := m.b(sin(x))) * m.g))) + tanh(h[..., :3]),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {},
        2,
    ),
    "behind: read between": (
        lambda m, x: (
            tanh(m.r(rms(m.a(x) + (F.linear(sin(x), m.b) + m.c) * m.g))) + tanh(F.linear(sin(x), m.b)[..., :3])
        ),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": numbers(4, 4), "c": numbers(4), "g": numbers(4)},
        {},
        2,
    ),
    "behind: returned": (
        lambda m, x: (tanh(m.r(rms(m.a(x) + (h := m.b(sin(x))) * m.g))), h),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {},
        1,
    ),
    "behind: 1+w": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * (1 + m.g)))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind: weights in stream too": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.g + m.b(x)))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4)},
        {},
        11,
    ),
    "behind: reads the stream": (
        lambda m, x: tanh(m.r(rms((h := m.a(x)) + m.b(rms(h)) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind: reads the stream ln": (
        lambda m, x: tanh(m.r(ln((h := m.a(x)) + m.b(ln(h)) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {
            "DW005 a.weight": 4,
            "DW005 b.weight": 4,
            "DW005 b.bias": 1,
            "DW008 b.weight": 3,
            "DW008 r.weight": 3,
            "DW011 g": 4,
            "DW012 a.weight": 3,
            "DW014 a.weight": 1,
        },
        0,
    ),
    "behind: transposed places": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)).transpose(0, 1).reshape(2, 5, 4) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind: channels transposed": (
        lambda m, x: tanh(m.r(rms(m.a(x[:, :4]) + m.b(sin(x[:, :4])).mT * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4)},
        {},
        2,
    ),
    "behind: gain weight": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.a.weight[0]))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4)},
        {},
        7,
    ),
    "behind: tied weight": (
        lambda m, x: tanh(m.r(rms(m.a(x) + m.b(sin(x)) * m.g))) + tanh(m.b(x))[..., :3],
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4)},
        {},
        2,
    ),
    "behind: no norm, the gain first": (
        lambda m, x: tanh(m.r(m.b(sin(x)) * m.g + m.a(x))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW019 a.weight": 16},
        5,
    ),
    "behind: no norm": (
        lambda m, x: tanh(m.r(m.a(x) + m.b(sin(x)) * m.g)),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {"DW011 g": 4, "DW019 a.weight": 16},
        5,
    ),
    "behind: only": (
        lambda m, x: tanh(m.r(rms(m.b(sin(x)) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": linear(4, 4), "g": numbers(4)},
        {"DW001 a.weight": 16, "DW011 g": 4, "DW014 b.weight": 1},
        6,
    ),
    "part and a table behind a view": (
        lambda m, x: tanh(m.r(rms((h := m.w(x))[..., :4] + m.p[None]))) + sin(h[..., 4:7]),
        {"w": matrix(4, 8), "p": numbers(5, 4), "r": matrix(4, 3)},
        {},
        11,
    ),
    "part and another map": (
        lambda m, x: tanh(m.r(rms((h := m.w(x))[..., :4] + m.b(sin(x))))) + sin(h[..., 4:7]),
        {"w": matrix(4, 8), "b": matrix(4, 4), "r": matrix(4, 3)},
        {},
        11,
    ),
    "behind: computed bias": (
        lambda m, x: tanh(m.r(rms(m.a(x) + (m.b(sin(x)) + sin(m.c)) * m.g))),
        {"a": matrix(4, 4), "r": matrix(4, 3), "b": matrix(4, 4), "g": numbers(4), "c": numbers(4)},
        {},
        11,
    ),
    "gain is normed too": (
        lambda m, x: tanh(m.r(m.a(x) + rms(sin(x)) * m.g)) + F.linear(rms(m.g), m.s),
        {"a": matrix(4, 4), "r": matrix(4, 3), "s": numbers(3, 4), "g": numbers(4)},
        {},
        17,
    ),
    "gain of no norm too": (
        lambda m, x: tanh(m.r(m.a(x) + rms(sin(x)) * m.g)) + m.s(tanh(x) * m.g),
        {"a": matrix(4, 4), "r": matrix(4, 3), "s": matrix(4, 3), "g": numbers(4)},
        {},
        8,
    ),
    "gain of two norms": (
        lambda m, x: tanh(m.r(m.a(x) + rms(sin(x)) * m.g + rms(x * x) * m.g)),
        {"a": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW019 a.weight": 4},
        4,
    ),
    "one plus gain of two norms": (
        lambda m, x: tanh(m.r(m.a(x) + rms(sin(x)) * (g := 1 + m.g) + rms(x * x) * g)),
        {"a": matrix(4, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW019 a.weight": 4},
        4,
    ),
    "mean of all numbers read": (
        lambda m, x: tanh(m.r(h := m.a(x))) + F.linear(h.mean().reshape(1, 1), m.v),
        {"a": matrix(4, 4), "r": matrix(4, 3), "v": numbers(3, 1)},
        {},
        13,
    ),
    "mean of sums of coordinates": (
        lambda m, x: tanh(m.r(((h := m.a(x)) + h.flip(-1)).mean(1))),
        {"a": matrix(4, 4), "r": matrix(4, 3)},
        {},
        18,
    ),
    "vector of the space multiplied": (
        lambda m, x: tanh(x @ (h := m.a(x))[0, 0]) + h.mean(),
        {"a": matrix(4, 4)},
        {},
        0,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), STREAMS.values(), ids=list(STREAMS))
def test_a_space_turns_only_if_all_its_writers_and_readers_turn_with_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


TABLES: dict[str, Case] = {
    "int table": (
        lambda m, t: tanh(m.r(rms(m.e(t) + F.embedding(t, m.p)))),
        {"e": table(7, 4), "p": nn.Parameter(torch.arange(28).reshape(7, 4), requires_grad=False), "r": matrix(4, 3)},
        {},
        19,
    ),
    "computed table": (
        lambda m, t: tanh(m.r(rms(m.e(t) + F.embedding(t, sin(m.p))))),
        {"e": table(7, 4), "p": numbers(7, 4), "r": matrix(4, 3)},
        {"DW020 p": 28},
        19,
    ),
    "buffer table": (
        lambda m, t: tanh(m.r(rms(m.e(t) + F.embedding(t, m.q.u)))),
        {"e": table(7, 4), "r": matrix(4, 3), "q": Buffers(u=numbers(7, 4))},
        {},
        19,
    ),
    "behind gain table": (
        lambda m, t: tanh(m.r(rms(m.a(t) + m.b(t) * m.g))),
        {"a": table(7, 4), "b": table(7, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW020 g": 4, "DW020 b.weight": 28, "DW012 a.weight": 6, "DW014 a.weight": 1},
        12,
    ),
    "behind table tied": (
        lambda m, t: tanh(m.r(rms(m.a(t) + m.b(t) * m.g))) + sin(m.b(t)[..., :3]),
        {"a": table(7, 4), "b": table(7, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW020 g": 4},
        47,
    ),
    "behind table": (
        lambda m, t: tanh(m.r(rms(m.a(t) + m.b(t) * m.g + m.c(t.flip(1))))),
        {"a": table(7, 4), "b": table(7, 4), "c": table(7, 4), "r": matrix(4, 3), "g": numbers(4)},
        {"DW020 g": 4, "DW020 b.weight": 28, "DW013 a.weight": 4, "DW012 a.weight": 6, "DW014 a.weight": 1},
        0,
    ),
    "behind ln table": (
        lambda m, t: tanh(m.r(ln(m.b(t) * m.g + m.c(t.flip(1))))),
        {"b": table(7, 4), "c": table(7, 4), "r": matrix(4, 3), "g": numbers(4)},
        {
            "DW005 c.weight": 7,
            "DW013 b.weight": 4,
            "DW008 r.weight": 3,
            "DW011 g": 4,
            "DW012 c.weight": 3,
            "DW014 b.weight": 1,
        },
        6,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TABLES.values(), ids=list(TABLES))
def test_a_space_of_tables_turns_only_if_all_its_writers_and_readers_turn_with_it(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left
