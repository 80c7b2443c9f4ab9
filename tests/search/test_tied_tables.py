"""A table that a readout uses too: what its rows may still do (DW013), and where nothing is left of it.

Each case says what the search claims, worked out by hand, and how many redundant dimensions it leaves unexplained; both
are held against the nullity of the module's Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, sin, softmax, tanh

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

from .conftest import Odd
from .parts import Buffers, T, ln, numbers, rms, table

T4 = T.clamp(max=3)
Case = tuple[Callable, dict[str, Any], dict[str, int], int]  # forward, parts, findings, and what is left unexplained


def head(m: Any, h: Tensor) -> Tensor:
    return F.linear(ln(h) * m.g + m.b, m.e.weight)


def pos(t: Tensor) -> Tensor:
    """Positions, counted without the tokens that are 1."""
    there = (t != 1).long()
    return there.cumsum(1) * there


TIED: dict[str, Case] = {
    "tied": (
        lambda m, t: head(m, m.e(t) + m.p) + m.c,
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4), "c": numbers(7)},
        {"DW005 p": 5, "DW013 e.weight": 1, "DW006 b": 4, "DW014 e.weight": 1},
        0,
    ),
    "tied no shift": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5, "DW013 e.weight": 1, "DW014 e.weight": 1},
        0,
    ),
    "tied no bias": (
        lambda m, t: head(m, m.e(t) + m.p),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        0,
    ),
    "tied bias read elsewhere": (
        lambda m, t: head(m, m.e(t) + m.p) + m.c + sin(m.c),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4), "c": numbers(7)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        5,
    ),
    "tied rms": (
        lambda m, t: F.linear(rms(m.e(t) + m.p) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW014 e.weight": 1},
        0,
    ),
    "tied beta is position bias": (
        lambda m, t: F.linear(ln(m.e(t) + m.b) * m.g + m.b, m.e.weight) + m.c,
        {"e": table(7, 4), "g": numbers(4), "b": numbers(4), "c": numbers(7)},
        {"DW017 b": 1},
        5,
    ),
    "tied gain takes": (
        lambda m, t: F.linear(ln(m.e(t) + m.g) * m.g, m.e.weight),
        {"e": table(7, 4), "g": numbers(4)},
        {},
        0,
    ),
    "tied read twice": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight) + sin(F.linear(ln(sin(m.e(t))) * m.g, m.e.weight)),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        0,
    ),
    "tied table nobody takes": (
        lambda m, t: F.linear(ln(sin(m.e(t)) + m.p) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        0,
    ),
    "tied also as index data": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight) + sin(m.e.weight.sum()),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        1,
    ),
    "tied sliced": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight[:5]),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5},
        4,
    ),
    "tied softmax out": (
        lambda m, t: softmax(F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight), -1),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5, "DW013 e.weight": 4, "DW014 e.weight": 1},
        0,
    ),
    "tied readout as data": (
        lambda m, t: tanh(F.linear(m.e.weight, m.w))[None, :5] + tanh(m.e(t) + m.p),
        {"e": table(7, 4), "w": numbers(4, 4), "p": numbers(5, 4)},
        {},
        0,
    ),
    "tied paired": (
        lambda m, t: F.linear(ln(m.e(t) + m.p(pos(t))) * m.g + m.b, m.e.weight) + m.c,
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4), "b": numbers(4), "c": numbers(7)},
        {"DW005 p.weight": 6, "DW013 e.weight": 1, "DW013 e.weight[1:2]": 1, "DW006 b": 4, "DW014 e.weight": 1},
        1,
    ),
    "tied paired no bias": (
        lambda m, t: F.linear(ln(m.e(t) + m.p(pos(t))) * m.g + m.b, m.e.weight),
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p.weight": 6, "DW014 e.weight": 1},
        1,
    ),
    "tied paired no shift": (
        lambda m, t: F.linear(ln(m.e(t) + m.p(pos(t))) * m.g, m.e.weight),
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4)},
        {"DW005 p.weight": 6, "DW013 e.weight": 1, "DW013 e.weight[1:2]": 1, "DW014 e.weight": 1},
        1,
    ),
    "tied paired rms": (
        lambda m, t: F.linear(rms(m.e(t) + m.p(pos(t))) * m.g, m.e.weight),
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4)},
        {"DW014 e.weight": 1},
        1,
    ),
    "paired with other reader": (
        lambda m, t: F.linear(ln(m.e(t) + m.p(pos(t))) * m.g, m.w) + sin(m.e.weight[:5]).sum(),
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4), "w": numbers(3, 4)},
        {"DW005 p.weight": 6, "DW008 w": 3, "DW006 g": 4},
        17,
    ),
    "tied dies where it is looked up": (
        lambda m, t: F.linear(ln(softmax(m.e(t), 1) + m.p) * m.g, m.e.weight),
        {"e": table(7, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5, "DW013 e.weight": 1},
        0,
    ),
    "tied paired two readouts": (
        lambda m, t: (
            F.linear(ln(h := (m.e(t) + m.p(pos(t)))) * m.g, m.e.weight) + sin(F.linear(ln(h) * m.k, m.e.weight))
        ),
        {"e": table(7, 4), "p": table(6, 4), "g": numbers(4), "k": numbers(4)},
        {"DW005 p.weight": 6, "DW014 e.weight": 1},
        1,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), TIED.values(), ids=list(TIED))
def test_a_tied_table_moves_along_what_the_readout_does_not_see(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


PAIRED: dict[str, Case] = {
    "paired": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4, "DW013 e.weight[1:2]": 4},
        0,
    ),
    "paired by equality": (
        lambda m, t: tanh(m.e(t) + m.p((1 - (t == 1).long()) * 2)),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4, "DW013 e.weight[1:2]": 4},
        16,
    ),
    "paired by a bound": (
        lambda m, t: tanh(m.e(t) + m.p((t > 1).long() * 2)),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        20,
    ),
    "paired with every place": (
        lambda m, t: tanh(m.e(t) + m.p((t != 1).long() * 0)),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        20,
    ),
    "paired with several": (
        lambda m, t: tanh(m.e(t) + m.p((t != 1).long().cumsum(1))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "paired at other places": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t).flip(1))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "paired with tokens too": (
        lambda m, t: tanh(m.e(t) + m.p((t != 1).long() * t)),
        {"e": table(7, 4), "p": table(7, 4)},
        {"DW013 e.weight": 4},
        24,
    ),
    "paired of another token": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t + 1))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "paired and read": (
        lambda m, t: tanh((h := m.e(t)) + m.p(pos(t))) + sin(h),
        {"e": table(7, 4), "p": table(6, 4)},
        {},
        4,
    ),
    "paired and the sum read": (
        lambda m, t: tanh((h := (m.e(t) + m.q(t.flip(1)))) + m.p(pos(t))) + sin(h),
        {"e": table(7, 4), "p": table(6, 4), "q": table(7, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "paired behind a sum": (
        lambda m, t: tanh(m.e(t) + m.q(t.flip(1)) + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4), "q": table(7, 4)},
        {"DW013 e.weight": 4, "DW013 p.weight": 4, "DW013 e.weight[1:2]": 4},
        0,
    ),
    "paired and returned": (
        lambda m, t: (tanh((h := m.e(t)) + m.p(pos(t))), h),
        {"e": table(7, 4), "p": table(6, 4)},
        {},
        0,
    ),
    "paired by a difference": (lambda m, t: tanh(m.e(t) - m.p(pos(t))), {"e": table(7, 4), "p": table(6, 4)}, {}, 8),
    "paired with a weight": (
        lambda m, t: tanh(torch.add(m.e(t), m.p(pos(t)), alpha=2)),
        {"e": table(7, 4), "p": table(6, 4)},
        {},
        8,
    ),
    "paired twice as much": (
        lambda m, t: tanh(m.e(t) * 2 + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "paired through a product": (
        lambda m, t: tanh(m.e(t) * m.q(t.flip(1)) + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4), "q": table(7, 4)},
        {},
        4,
    ),
    "paired with a number": (
        lambda m, t: tanh(m.e(t) + 1 + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "paired with a table read twice": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t))) + m.p(torch.arange(5)),
        {"e": table(7, 4), "p": table(6, 4)},
        {},
        0,
    ),
    "paired with a first table read twice": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t))) + m.e(t.flip(1)),
        {"e": table(7, 4), "p": table(6, 4)},
        {},
        0,
    ),
    "paired with itself": (lambda m, t: tanh(m.e(t) + m.e(pos(t))), {"e": table(7, 4)}, {}, 0),
    "paired in one row of all": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t[:1]))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "paired beside more": (
        lambda m, t: tanh((m.e(t) + m.p(pos(t)))[:, None] + m.q[:, None]),
        {"e": table(7, 4), "p": table(6, 4), "q": numbers(3, 4)},
        {"DW013 e.weight": 4, "DW013 p.weight": 4, "DW013 e.weight[1:2]": 4},
        0,
    ),
    "paired in a wider sum": (
        lambda m, t: tanh(m.e(t) + (m.p(pos(t)) + m.q[:, None, None])),
        {"e": table(7, 4), "p": table(6, 4), "q": numbers(3, 4)},
        {"DW013 e.weight": 4, "DW013 p.weight": 4},
        4,
    ),
    "paired with a computed table": (
        lambda m, t: tanh(m.e(t) + F.embedding(pos(t), sin(m.p))),
        {"e": table(7, 4), "p": numbers(6, 4)},
        {},
        8,
    ),
    "paired from a computed table": (
        lambda m, t: tanh(F.embedding(t, sin(m.e)) + m.p(pos(t))),
        {"e": numbers(7, 4), "p": table(6, 4)},
        {},
        8,
    ),
    "paired before a LayerNorm": (
        lambda m, t: ln(m.e(t) + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW005 e.weight": 7, "DW005 p.weight": 6, "DW013 e.weight": 3, "DW013 e.weight[1:2]": 3, "DW014 e.weight": 1},
        1,
    ),
    "paired with stored positions": (
        lambda m, t: tanh(m.e(t) + m.p(torch.arange(5) * (t != 1).long())),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "paired with positions of their own": (
        lambda m, t: tanh(m.e(t) + m.p((torch.arange(5) + 1) * (t != 1).long())),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4, "DW013 e.weight[1:2]": 4},
        0,
    ),
    "paired with a learned start": (
        lambda m, t: tanh(m.e(t) + m.p(((t != 1).long() * m.s.abs()).long().clamp(max=5))),
        {"e": table(7, 4), "p": table(6, 4), "s": numbers(1)},
        {"DW013 e.weight": 4},
        20,
    ),
    "other width": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t))),
        {"e": table(7, 4), "p": table(6, 1)},
        {"DW013 p.weight": 1},
        1,
    ),
    "one sequence for all": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t)[:1])),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        0,
    ),
    "compared with a float": (
        lambda m, t: tanh(m.e(t) + m.p((there := (t != 1.0).long()).cumsum(1) * there)),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "compared with each other": (
        lambda m, t: tanh(m.e(t) + m.p((there := (t != t.flip(1)).long()).cumsum(1) * there)),
        {"e": table(7, 4), "p": table(6, 4)},
        {"DW013 e.weight": 4},
        4,
    ),
    "several rows for one token": (
        lambda m, t: tanh(m.e(t) + m.p(pos(t) + (t == 1) * (6 + torch.arange(5)))),
        {"e": table(7, 4), "p": table(11, 4)},
        {"DW013 e.weight": 4},
        8,
    ),
    "several rows for one token, compared once": (
        lambda m, t: tanh(
            m.e(t) + m.p((there := (t != 1).long()).cumsum(1) * there + (1 - there) * (6 + torch.arange(5)))
        ),
        {"e": table(7, 4), "p": table(11, 4)},
        {"DW013 e.weight": 4},
        8,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), PAIRED.values(), ids=list(PAIRED))
def test_rows_that_always_meet_are_paired(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


SQUARE: dict[str, Case] = {
    "tied square transposed": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g, m.e.weight.T),
        {"e": table(4, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW005 p": 5, "DW014 e.weight": 1},
        2,
    ),
    "tied bias d=V": (
        lambda m, t: F.linear(ln(m.e(t) + m.p) * m.g + m.b, m.e.weight) + m.b,
        {"e": table(4, 4), "p": numbers(5, 4), "g": numbers(4), "b": numbers(4)},
        {"DW005 p": 5},
        3,
    ),
    "paired square T": (
        lambda m, t: F.linear(ln(m.e(t) + m.p(pos(t))) * m.g, m.e.weight.T),
        {"e": table(4, 4), "p": table(6, 4), "g": numbers(4)},
        {"DW005 p.weight": 6, "DW014 e.weight": 1},
        6,
    ),
    "tied square T tanh": (
        lambda m, t: F.linear(ln(tanh(m.e(t) + m.p)) * m.g, m.e.weight.T),
        {"e": table(4, 4), "p": numbers(5, 4), "g": numbers(4)},
        {},
        0,
    ),
    "tied square tanh": (
        lambda m, t: F.linear(ln(tanh(m.e(t) + m.p)) * m.g, m.e.weight),
        {"e": table(4, 4), "p": numbers(5, 4), "g": numbers(4)},
        {"DW013 e.weight": 1},
        0,
    ),
    "paired square T, bounded": (
        lambda m, t: F.linear(ln(tanh(m.e(t) + m.p(pos(t)))) * m.g, m.e.weight.T),
        {"e": table(4, 4), "p": table(6, 4), "g": numbers(4)},
        {},
        3,
    ),
    "paired square": (
        lambda m, t: F.linear(ln(tanh(m.e(t) + m.p(pos(t)))) * m.g, m.e.weight),
        {"e": table(4, 4), "p": table(6, 4), "g": numbers(4)},
        {"DW013 e.weight": 1, "DW013 e.weight[1:2]": 1},
        2,
    ),
}


@pytest.mark.parametrize(("forward", "parts", "findings", "left"), SQUARE.values(), ids=list(SQUARE))
def test_a_square_table_that_is_read_transposed_has_other_rows(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int], left: int
) -> None:
    counted = census(forward, T4, **parts)
    assert counted.findings == findings
    assert counted.unexplained == left


NUMBERS = {0: 8, 3: 8, 6: 8, -1: 4, -7: 4, 7: 4, 9: 4}


@pytest.mark.parametrize(("number", "dof"), NUMBERS.items())
def test_rows_are_paired_only_if_the_table_has_such_a_row(census: Callable, number: int, dof: int) -> None:
    def forward(m: Any, t: Tensor) -> Tensor:
        there = (t != number).long()
        return tanh(m.e(t) + m.p(there.cumsum(1) * there))

    findings = census(forward, T, e=table(7, 4), p=table(6, 4)).findings
    assert sum(findings.values()) == dof


@pytest.mark.parametrize(("device", "dof"), [("cpu", 8), ("meta", 4)])
def test_rows_of_a_model_without_values_are_not_paired(device: str, dof: int) -> None:
    """Positions are looked up in a table of constants; without its values nothing is known of them."""

    def forward(m: Any, t: Tensor) -> Tensor:
        return tanh(m.e(t) + m.p(torch.gather(m.constants.places.expand(2, -1), 1, pos(t))))

    parts = {"e": table(7, 4), "p": table(6, 4), "constants": Buffers(places=torch.arange(6))}
    graph = canonical(trace(Odd(forward, **parts).to(device), (T.to(device),)))
    assert sum(claim.dof for claim in search(graph).claims) == dof
