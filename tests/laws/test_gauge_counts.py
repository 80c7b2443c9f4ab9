"""What a gauge makes redundant: its group, less the turns that move nothing. Every count is held against the rank of
the motions and the nullity of the Jacobian, and the chains against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight

THREE, FOUR = torch.randn(4, 6, 3), torch.randn(2, 6, 4)
TOKENS = torch.randint(0, 5, (2, 6))


class Lambda(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def chain(*widths: int, biases: str) -> nn.Sequential:
    """Linear maps in a row; `biases` has a + for each that has one."""
    return nn.Sequential(*[nn.Linear(a, b, bias=c == "+") for a, b, c in zip(widths, widths[1:], biases, strict=False)])


def counted(module: nn.Module, inputs: Tensor, **options: Any) -> tuple[int, dict[str, int], deadweight.Audit]:
    torch.manual_seed(0)
    result = deadweight.audit(module, inputs, complete=True, **options)
    by_law: dict[str, int] = {}
    for f in result.findings:
        if f.tier != "epsilon":
            by_law[f.code] = by_law.get(f.code, 0) + f.dof
    assert result.completeness is not None and not result.completeness.unsound
    return sum(by_law.values()), by_law, result


# A product of maps from 3 to 3 numbers is one matrix of 9 numbers, or of 2·(3 + 3 − 2) where the narrowest is 2.
CHAINS = [
    ((3, 10, 3), "--", 60 - 9),
    ((3, 10, 3), "++", 73 - 12),  # 10 of them the first bias, which folds
    ((3, 10, 3), "+-", 70 - 12),
    ((3, 10, 3), "-+", 63 - 12),
    ((3, 2, 3), "--", 4),
    ((3, 3, 3), "--", 9),
    ((3, 10, 10, 3), "---", 160 - 9),
    ((3, 10, 5, 3), "---", 95 - 9),
    ((3, 5, 10, 3), "+++", 113 - 12),
    ((3, 10, 2, 10, 3), "----", 100 - 8),
]


@pytest.mark.parametrize(("widths", "biases", "redundant"), CHAINS)
def test_a_wide_middle_counts_only_the_turns_that_move_something(
    widths: tuple[int, ...], biases: str, redundant: int
) -> None:
    total, by_law, result = counted(chain(*widths, biases=biases), THREE)
    assert total == redundant == result.completeness.measured == result.completeness.explained  # type: ignore[union-attr]
    assert set(by_law) <= {"DW017", "DW019"}


def test_one_wide_middle_counts_by_the_formula() -> None:
    for bias, written in ((False, 3), (True, 4)):
        _, by_law, _ = counted(chain(3, 10, 3, biases="+-" if bias else "--"), THREE)
        assert by_law == {"DW019": 10**2 - (10 - written) * (10 - 3)}


class Attention(nn.Module):
    """Heads of any width, grouped keys, partly rotary; norms before and behind."""

    def __init__(
        self, head: int, *, heads: int = 2, groups: int = 2, biases: str = "qkvo", rotary: int = 0, norm: bool = False
    ) -> None:
        super().__init__()
        self.head, self.repeat, self.rotary = head, heads // groups, rotary
        sizes = {"q": (4, heads * head), "k": (4, groups * head), "v": (4, groups * head), "o": (heads * head, 4)}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*size, bias=name in biases))
        self.before = nn.LayerNorm(4) if norm else nn.Identity()
        self.behind = nn.LayerNorm(4) if norm else nn.Identity()

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]), 10.0 ** -torch.arange(self.rotary // 2)).to(x.dtype)
        first, second, rest = x.split([self.rotary // 2, self.rotary // 2, self.head - self.rotary], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (self.turned(q), self.turned(k)) if self.rotary else (q, k)
        k, v = (t.repeat_interleave(self.repeat, 1) for t in (k, v))
        mixed = torch.softmax(q @ k.mT / math.sqrt(self.head), -1) @ v
        return self.behind(self.o(mixed.transpose(1, 2).flatten(-2)))


# Heads of 7 in a width of 4: queries are written by 4 columns and a bias, keys by 4 (their bias is dead), values by 4
# (their bias folds), and the output reads 4.
HEADS: dict[str, tuple[nn.Module, dict[str, int]]] = {
    "wide": (Attention(7), {"DW009": 2 * (49 - 2 * 3), "DW010": 2 * (49 - 3 * 3)}),
    "wide, no biases": (Attention(7, biases=""), {"DW009": 2 * (49 - 3 * 3), "DW010": 2 * (49 - 3 * 3)}),
    "as wide as the model": (Attention(4), {"DW009": 2 * 16, "DW010": 2 * 16}),
    "one wider": (Attention(5), {"DW009": 2 * 25, "DW010": 2 * (25 - 1)}),
    "wide, one group": (Attention(10, groups=1, biases=""), {"DW009": 100 - 2 * 6, "DW010": 100 - 6 * 2}),
    "wide, rotary": (Attention(6, rotary=6, biases=""), {"DW009": 2 * 6, "DW010": 2 * (36 - 2 * 2)}),
    "wide, partly rotary": (Attention(9, rotary=2), {"DW009": 2 * (2 + 49 - 2 * 3), "DW010": 2 * (81 - 5 * 5)}),
    "one head between norms": (Attention(4, heads=1, groups=1, norm=True), {"DW009": 16, "DW010": 16 - 1}),
}


@pytest.mark.parametrize(("module", "expected"), HEADS.values(), ids=list(HEADS))
def test_heads_wider_than_what_writes_and_reads_them(module: nn.Module, expected: dict[str, int]) -> None:
    total, by_law, result = counted(module, FOUR)
    assert {code: by_law.get(code) for code in expected} == expected
    assert total == result.completeness.explained == result.completeness.measured  # type: ignore[union-attr]


def branches(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return torch.tanh(m.c(m.b(h))) + m.e(m.d(h))


def bare(norm: type[nn.Module], width: int) -> nn.Module:
    return norm(width, elementwise_affine=False)


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


# Not everything is explained here, but nothing is counted twice.
OTHERS: dict[str, tuple[nn.Module, Tensor, dict[str, Any]]] = {
    "branches": (
        Lambda(branches, a=linear(3, 8), b=linear(8, 7), c=linear(7, 2), d=linear(8, 6), e=linear(6, 2)),
        THREE,
        {},
    ),
    "a skip": (
        Lambda(
            lambda m, x: m.c((h := m.a(x)) + m.e(m.b(h))),
            a=linear(3, 9),
            b=linear(9, 3),
            e=linear(3, 9),
            c=linear(9, 2),
        ),
        THREE,
        {},
    ),
    "a norm": (nn.Sequential(linear(3, 10), bare(nn.RMSNorm, 10), linear(10, 3)), THREE, {}),
    "a LayerNorm": (nn.Sequential(nn.Linear(3, 10), bare(nn.LayerNorm, 10), nn.Linear(10, 3)), THREE, {}),
    "before a LayerNorm": (nn.Sequential(linear(3, 10), linear(10, 4), nn.LayerNorm(4)), THREE, {}),
    "convolutions": (nn.Sequential(nn.Conv1d(2, 12, 2), nn.Conv1d(12, 2, 3)), torch.randn(3, 2, 9), {}),
    "probabilities": (chain(3, 10, 3, biases="--"), THREE, {"output": "probabilities"}),
    "tables": (
        Lambda(
            lambda m, t: torch.tanh(m.read(m.write(m.tokens(t) + m.places(torch.arange(6))))),
            tokens=nn.Embedding(5, 8),
            places=nn.Embedding(6, 8),
            write=nn.Linear(8, 12),
            read=nn.Linear(12, 3),
        ),
        TOKENS,
        {},
    ),
}


@pytest.mark.parametrize(("module", "inputs", "options"), OTHERS.values(), ids=list(OTHERS))
def test_nothing_is_counted_twice(module: nn.Module, inputs: Tensor, options: dict) -> None:
    total, _, result = counted(module, inputs, **options)
    assert total == result.completeness.explained  # type: ignore[union-attr]


def test_a_table_that_a_linear_map_reads_is_a_chain() -> None:
    """A factorised embedding: 5 rows of 9 numbers and 3 readers; the bias takes one row's worth, DW013 counts it."""
    table = Lambda(lambda m, t: torch.tanh(m.read(m.table(t))), table=nn.Embedding(5, 9), read=nn.Linear(9, 3))
    total, by_law, result = counted(table, TOKENS)
    assert by_law == {"DW013": 9, "DW019": 9**2 - (9 - 4) * (9 - 3)}
    assert total == 5 * 9 + 9 * 3 + 3 - 5 * 3 == result.completeness.measured  # type: ignore[union-attr]
    bent = Lambda(lambda m, t: m.read(torch.tanh(m.table(t))), table=nn.Embedding(5, 9), read=nn.Linear(9, 3))
    assert "DW019" not in counted(bent, TOKENS)[1]


class ConvolvedQueries(nn.Module):
    """Queries and keys that convolutions make: channels stand on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Conv1d(3, 4, 1, bias=False), nn.Conv1d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.query(x).transpose(1, 2) @ self.key(x))


def test_queries_and_keys_of_convolutions_have_a_basis_too() -> None:
    result = deadweight.audit(ConvolvedQueries(), torch.randn(2, 3, 5), complete=True)
    assert {f.code: f.dof for f in result.findings}["DW009"] == 16 - (4 - 3) ** 2
    assert result.completeness is not None and result.completeness.measured == result.completeness.explained
