"""What is not labelled element by element because it is large gets the verdicts that it gets when it is small.

The limit is set to 0 here, so that small modules take the ways of large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.proof import basis_rules, identity_labels
from deadweight.proof.shift_rules import scores as score_rules

WIDTH, LENGTH = 3, 4
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Queries, keys, values, an output map and some more parameters, over one function."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.offset, self.gain = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(LENGTH, 1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.o(self.function(self, x)))


def scores(m: Attention, x: Tensor) -> Tensor:
    return m.q(x) @ m.k(x).mT


def cancelled(m: Attention, x: Tensor) -> Tensor:
    """The offset differs from key to key, and is taken back."""
    q, k = m.q(x), m.k(x).mT
    return ((q + m.offset) @ k - m.offset.expand_as(q) @ k).softmax(-1) @ m.v(x)


def difference(m: Attention, x: Tensor) -> Tensor:
    """Sums for different queries are different vectors: a function of their difference fixes the basis of values."""
    sums = scores(m, x).softmax(-1) @ m.v(x)
    return sums + m.o(torch.tanh(sums[:, :1] - sums[:, 1:2]))


def by_position(m: Attention, x: Tensor) -> Tensor:
    """Keys that grow with their position: no bias of theirs is dead."""
    return (m.q(x) @ (m.k(x) * torch.arange(1.0, LENGTH + 1)[:, None]).mT).softmax(-1) @ m.v(x)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {  # laws that must be among the findings
    "attention": (lambda m, x: scores(m, x).softmax(-1) @ m.v(x), {"DW002", "DW003", "DW009", "DW010"}),
    "a multiple and a mask": (
        lambda m, x: (scores(m, x) / 2 + torch.full((LENGTH, LENGTH), -9.0).triu(1)).softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW009", "DW010"},
    ),
    "over queries": (lambda m, x: scores(m, x).softmax(-2) @ m.v(x), {"DW002", "DW009", "DW010"}),
    "sigmoid": (lambda m, x: torch.sigmoid(scores(m, x)) @ m.v(x), {"DW009", "DW010"}),
    "keys by position": (by_position, {"DW003", "DW009", "DW010"}),
    "read twice": (lambda m, x: scores(m, x).softmax(-1) @ m.v(x) + scores(m, x) @ x, {"DW009"}),
    "taken back": (cancelled, {"DW003", "DW010"}),
    "weights times a factor": (
        lambda m, x: (scores(m, x).softmax(-1) * torch.arange(1.0, LENGTH + 1)) @ m.v(x),
        {"DW002", "DW009", "DW010"},
    ),
    "values in part": (
        lambda m, x: scores(m, x).softmax(-1) @ (m.v(x) * torch.tensor([1.0, 1.0, 0.0])),
        {"DW002", "DW003", "DW009"},
    ),
    "values by channel and position": (
        lambda m, x: scores(m, x).softmax(-1) @ (m.v(x) * torch.arange(1.0, 13.0).reshape(LENGTH, WIDTH)),
        {"DW002", "DW009"},
    ),
    "a difference of sums": (difference, {"DW002", "DW009"}),
    "two sums of values": (
        lambda m, x: (scores(m, x).softmax(-1) + torch.sigmoid(scores(m, x))) @ m.v(x),
        {"DW009", "DW010"},
    ),
}


def findings(module: nn.Module) -> dict[tuple[str, str], tuple[int, str]]:
    graph = canonical(trace(module.eval(), (X,)))
    return {(c.code, graph.parameters[c.node]): (c.dof, c.verdict) for c in search(graph).claims}


@pytest.mark.parametrize(("function", "laws"), CASES.values(), ids=list(CASES))
def test_large_values_have_the_verdicts_of_small_ones(
    function: Callable, laws: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Attention(function)
    small = findings(module)
    for rules in (score_rules, identity_labels, basis_rules):
        monkeypatch.setattr(rules, "LARGE", 0)
    assert findings(module) == small
    assert laws <= {code for code, _ in small}
