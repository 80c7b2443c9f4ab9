"""What is not labelled element by element because it is large gets the verdicts that it gets when it is small.

The limit is set to 0 here, so that small modules take the ways of large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.proof import identity_labels, steps
from deadweight.proof.basis_rules import maps
from deadweight.proof.shift_rules import scores as score_rules
from deadweight.search.prover import Prover

WIDTH, LENGTH = 3, 4
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLACES, TWO = torch.arange(1.0, LENGTH + 1)[:, None], torch.tensor([[1.0, 2.0]])
ALIKE = torch.arange(1.0, WIDTH + 1)[:, None].repeat(1, LENGTH).double()
STAYS = 1e-11  # of outputs of order one: float64 rounds at about 1e-16


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


def heads(h: Tensor) -> Tensor:
    """As many heads as channels."""
    return h.unflatten(-1, (WIDTH, 1)).transpose(1, 2)


def one_key(m: Attention, x: Tensor) -> Tensor:
    """Two heads; in the first every position has the same key, so that nothing of its queries matters."""
    queries = torch.stack([m.q(x) + m.offset, torch.sin(x)], 1)
    keys = torch.stack([m.k(x)[:, :1].expand(-1, LENGTH, -1), m.v(x)], 1)
    return (queries @ keys.mT).softmax(-1).sum(1) @ x


def doubled(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of doubled values, for the first channel; for the others the double of their sums."""
    return torch.cat([(weights @ (2 * values))[..., :1], (weights @ values * 2)[..., 1:]], -1)


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
    "taken back, and a bias of keys": (
        lambda m, x: cancelled(m, x) + (m.q(x) @ (x + m.offset).mT).softmax(-1) @ torch.cos(x),
        {"DW002", "DW003"},
    ),
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
    "values of each head": (
        lambda m, x: (heads(m.q(x)) @ heads(m.k(x)).mT).softmax(-1).matmul(heads(m.v(x))).transpose(1, 2).flatten(2),
        {"DW002", "DW003", "DW009", "DW010"},
    ),
    "a column times a row": (
        lambda m, x: (m.v(x)[:, :1].mT @ (x[:, :1] @ x.mT).softmax(-1)).mT,
        {"DW010"},
    ),
    "keys of one channel by position": (
        lambda m, x: (m.q(x) @ (m.k(x) * torch.cat([PLACES, TWO.expand(LENGTH, 2)], -1)).mT).softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW009", "DW010"},
    ),
    "learned keys and a bias of their scores": (
        lambda m, x: (m.q(x) @ torch.sin(m.o.weight) + m.offset).softmax(-1) @ torch.cos(x[:, :3]),
        {"DW003", "DW018"},
    ),
    "keys that are all alike in one head": (one_key, {"DW002", "DW018"}),
    "keys that are all alike, behind a function": (
        lambda m, x: (m.q(x) @ torch.sin(m.k(x).sum(1, keepdim=True).mT.expand(-1, -1, LENGTH))).softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW010"},
    ),
    "constant keys that are all alike": (
        lambda m, x: (m.q(x) @ ALIKE).softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW010"},
    ),
    "scores the other way round": (
        lambda m, x: scores(m, x).mT.softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW009", "DW010"},
    ),
    "a number added": (lambda m, x: (scores(m, x) + 1.0).softmax(-1) @ m.v(x), {"DW002", "DW003", "DW009", "DW010"}),
    "a multiple of scores added": (
        lambda m, x: torch.add(x @ x.mT, scores(m, x), alpha=2).softmax(-1) @ m.v(x),
        {"DW002", "DW003", "DW009", "DW010"},
    ),
    "values doubled before their sum and behind it": (
        lambda m, x: doubled(torch.sigmoid(scores(m, x)), -m.v(x)),
        {"DW009", "DW010"},
    ),
    "two sums of values": (
        lambda m, x: (scores(m, x).softmax(-1) + torch.sigmoid(scores(m, x))) @ m.v(x),
        {"DW009", "DW010"},
    ),
}


def findings(module: nn.Module) -> dict[tuple[str, str], tuple[int, str]]:
    """What is claimed of a module; it must stay the same function along every claim."""
    graph = canonical(trace(module.double().eval(), (X,)))
    claims = search(graph).claims
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    for claim in claims:
        moved = point.at(claim.member(point, torch.Generator().manual_seed(1)))
        assert float((moved.outputs[0] - point.outputs[0]).abs().max()) < STAYS, claim
    return {(c.code, graph.parameters[c.node]): (c.dof, c.verdict) for c in claims}


@pytest.mark.parametrize(("function", "laws"), CASES.values(), ids=list(CASES))
def test_large_values_have_the_verdicts_of_small_ones(
    function: Callable, laws: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Attention(function)
    small = findings(module)
    for rules in (score_rules, identity_labels, maps):
        monkeypatch.setattr(rules, "LARGE", 0)
    assert findings(module) == small
    assert laws <= {code for code, _ in small}


def twice_transposed(m: Attention, x: Tensor) -> Tensor:
    """The offset is taken back from products with the same numbers, seen otherwise; as a bias of keys it is dead."""
    square = x.mT @ x
    logits = (m.q(x) + m.offset) @ square - m.offset.expand_as(x) @ square.mT.mT
    return logits.softmax(-1) @ m.v(x)[:, :WIDTH] + (m.q(x) @ (x + m.offset).mT).softmax(-1) @ torch.cos(x)


def test_lines_of_one_value_seen_twice_are_the_same_lines() -> None:
    found = findings(Attention(twice_transposed))
    assert found["DW002", "offset"] == (WIDTH, "dead")


def test_values_turn_however_many_weights_sum_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of more elements than are told apart ends a proof; of weights only the lines are named."""
    weights, sums = 2 * LENGTH * LENGTH, 2 * LENGTH * WIDTH
    assert sums < weights
    monkeypatch.setattr(steps, "LARGEST", weights - 1)
    module = Attention(CASES["attention"][0])
    assert ("DW010", "v.weight") not in findings(module)
    for rules in (identity_labels, maps):
        monkeypatch.setattr(rules, "LARGE", 0)
    assert findings(module)["DW010", "v.weight"] == (WIDTH**2, "gauge")


def test_a_softmax_is_named_as_what_stops_a_shift_however_many_scores_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen before the labels of all pairs are written: of these there are too many to tell apart."""
    graph = canonical(trace(Attention(by_position).double().eval(), (X,)))
    monkeypatch.setattr(score_rules, "LARGE", 0)
    monkeypatch.setattr(steps, "LARGEST", 2 * LENGTH * LENGTH - 1)
    outcome = Prover(graph).walk("p_k_bias", torch.arange(1, WIDTH + 1))
    assert outcome.blocked is not None and outcome.blocked.op == "softmax"
