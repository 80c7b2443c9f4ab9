"""An amount that data decides is absorbed by no parameter and ignored by no statistics of a batch.

Every case has one number that depends on the whole input, so that its labels are as uniform as those of a constant:
only `Shift.fixed` tells them apart. Each has the neighbour in which that number is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.claims.claim import Title
from deadweight.claims.point import Point
from deadweight.graph.node import Graph
from deadweight.search.prover import Prover
from deadweight.search.shifts import make_claim

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 3], [2, 2, 3]])
ONE_BY_ONE, ALIKE = torch.arange(1, 5), torch.ones(4, dtype=torch.int64)
STEP = 1e-12  # of outputs of order one: float64 rounds at about 1e-16


def packed(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True).data


# f(m, x, i, s): a value that is shifted with p, by an amount in which the number s has a say.
CARRIED: dict[str, tuple[Callable, Tensor]] = {
    "product": (lambda m, x, i, s: x + m.p * s, ONE_BY_ONE),
    "quotient": (lambda m, x, i, s: x + m.p / s, ONE_BY_ONE),
    "product of two that are shifted": (lambda m, x, i, s: x + m.p * (m.p + s), ONE_BY_ONE),
    "shape": (lambda m, x, i, s: x + (m.p * s).flip(0), ONE_BY_ONE),
    "part of a list": (lambda m, x, i, s: x + (m.p.repeat(2) * s).chunk(2)[1], ONE_BY_ONE),
    "negation": (lambda m, x, i, s: x - (-(m.p * s)), ONE_BY_ONE),
    "addition, then a constant amount": (lambda m, x, i, s: m.p * s + (x + m.p), ONE_BY_ONE),
    "addition, after a constant amount": (lambda m, x, i, s: (x + m.p) + m.p * s, ONE_BY_ONE),
    "index that is known": (lambda m, x, i, s: x + (m.p * s)[torch.tensor([3, 1, 0, 2])], ONE_BY_ONE),
    "index of equals": (lambda m, x, i, s: x + (m.p * s)[i[0, 0].expand(4)], ALIKE),
    "index_select of equals": (lambda m, x, i, s: x + (m.p * s).index_select(0, i[0, :1].expand(4)), ALIKE),
    "embedding": (lambda m, x, i, s: F.embedding(i, (m.p * s).expand(5, 4)), ONE_BY_ONE),
    "mean of equals": (lambda m, x, i, s: x + (m.p * s).expand(3, 4).mean(0), ONE_BY_ONE),
    "mean of others": (lambda m, x, i, s: x + (m.p * s).mean(0, keepdim=True), ONE_BY_ONE),
    "sum": (lambda m, x, i, s: x + (m.p * s).sum(0, keepdim=True), ONE_BY_ONE),
    "ranking": (lambda m, x, i, s: torch.topk(x + m.p * s, 2, dim=1)[0], ONE_BY_ONE),
    "padding": (lambda m, x, i, s: x + F.pad((m.p * s)[1:], (0, 1)), ONE_BY_ONE),
    "packing": (lambda m, x, i, s: packed(x + m.p * s), ONE_BY_ONE),
    "mask": (lambda m, x, i, s: x + torch.where(m.mask, m.p * s, m.r), ONE_BY_ONE),
    "mask of minus infinity": (lambda m, x, i, s: x + (m.p * s).masked_fill(m.mask, -torch.inf), ONE_BY_ONE),
    "linear": (lambda m, x, i, s: F.linear(x + m.p * s, m.w), ONE_BY_ONE),
    "linear, the weight": (lambda m, x, i, s: torch.sin(x) + F.linear(m.p.expand(2, 3, 4), m.w * s), ONE_BY_ONE),
    "weights that sum to one": (lambda m, x, i, s: torch.softmax(x @ x.mT, -1) @ (x + m.p * s), ONE_BY_ONE),
    "matmul": (lambda m, x, i, s: (x + m.p * s) @ m.w, ONE_BY_ONE),
    "matmul, the other": (lambda m, x, i, s: torch.sin(x) + m.p.expand(2, 3, 4) @ (m.w * s), ONE_BY_ONE),
    "matmul of stacks": (lambda m, x, i, s: (x + m.p * s) @ torch.tanh(m.w).expand(2, 4, 4), ONE_BY_ONE),
    "matmul, from the left": (lambda m, x, i, s: torch.sin(x) + (m.w[:3, :3] * s) @ m.p.expand(3, 4), ONE_BY_ONE),
}


def traced_both(traced: Callable, forward: Callable) -> list[Graph]:
    """The graph where data decides, and the one where a parameter does."""
    numbers = (lambda m, x: x.mean(), lambda m, x: m.s)
    parts = {"p": torch.randn(4), "q": torch.randn(4), "r": torch.randn(4), "w": torch.randn(4, 4), "s": torch.rand(())}
    mask = nn.Buffer(torch.tensor([True, False, False, True]))
    return [
        traced(lambda m, x, i, n=n: torch.tanh(forward(m, x, i, n(m, x)) + m.q), (X, TOKENS), mask=mask, **parts)
        for n in numbers
    ]


@pytest.mark.parametrize(("forward", "groups"), CARRIED.values(), ids=list(CARRIED))
def test_an_amount_that_data_decides_is_absorbed_by_no_bias(
    traced: Callable, forward: Callable, groups: Tensor
) -> None:
    by_data, by_parameter = traced_both(traced, forward)
    prover = Prover(by_data)
    assert not prover.walk(by_data.node_of["p"], groups, "biases").proved
    prover = Prover(by_parameter)
    node = by_parameter.nodes[by_parameter.node_of["p"]]
    outcome = prover.walk(node.name, groups, "biases")
    if outcome.proved:
        assert_unchanged(by_parameter, make_claim(prover, Title("DW017", "two"), node, groups, outcome))


def assert_unchanged(graph: Graph, claim: Any) -> None:
    point = Point(
        graph, {n: t.detach() for n, t in graph.tensors.items()}, dict(zip(graph.inputs, (X, TOKENS), strict=True))
    )
    after = point.at(claim.member(point, torch.Generator().manual_seed(0)))
    for new, old in zip(after.outputs, point.outputs, strict=True):
        assert float((new - old).abs().max()) < STEP


def chosen_expert(m: Any, x: Tensor) -> Tensor:
    """One row times the matrix of the expert that data names."""
    index = (x[:1, 0, 0] > 0).to(torch.int64)
    return torch.matmul(m.p[index], x[:1, 0].unsqueeze(-1)).squeeze(-1)


# f(m, x, i): a value that p shifts by an amount which is data's alone to decide; labels are uniform in the example.
DECIDED: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "a mask": (lambda m, x, i: x + torch.where(x.mean() > 0, m.p, m.r), (4,)),
    "a row of a table": (lambda m, x, i: x + F.embedding(i.max().expand(3), m.p), (5, 4)),
    "an element": (lambda m, x, i: x + m.p[i.max()], (5,)),
    "an element that is gathered": (lambda m, x, i: x + torch.gather(m.p, 0, i[0, :1]), (5,)),
    "what a weight reads": (lambda m, x, i: x + F.linear(x.mean().expand(3, 4), m.p), (4, 4)),
    "what a kernel reads": (lambda m, x, i: x + F.conv1d(x[:1, :1, :3], m.p)[0, :, 0], (4, 1, 3)),
    "what an expert reads": (lambda m, x, i: x + chosen_expert(m, x), (2, 4, 4)),
    "noise": (lambda m, x, i: x + m.p * torch.rand((), dtype=x.dtype), (4,)),
    "noise for every element": (lambda m, x, i: x + m.p * torch.empty(4, dtype=x.dtype).exponential_(), (4,)),
    "a dropout mask": (lambda m, x, i: x + F.dropout(m.p, 0.5, True), (4,)),
}


@pytest.mark.parametrize(("forward", "shape"), DECIDED.values(), ids=list(DECIDED))
def test_a_choice_that_data_makes_is_absorbed_by_no_bias(
    traced: Callable, forward: Callable, shape: tuple[int, ...]
) -> None:
    parts = {"p": torch.randn(shape), "q": torch.randn(4), "r": torch.randn(4)}
    graph = traced(lambda m, x, i: torch.tanh(forward(m, x, i) + m.q), (X, TOKENS), training=True, **parts)
    groups = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    outcome = Prover(graph).walk(graph.node_of["p"], groups, "biases")
    assert not outcome.proved and not outcome.absorbed


def test_statistics_of_a_batch_keep_an_amount_that_each_sample_decides(traced: Callable) -> None:
    """In an example of one sample such an amount looks the same for all samples; in a batch of two it is not."""
    one, two = X[:1].mT, X.mT

    def forward(m: Any, x: Tensor) -> Tensor:
        shift = m.p.view(1, 4, 1) * x.mean((1, 2), keepdim=True)
        return F.batch_norm(torch.sin(x) + shift, None, None, training=True)

    p = torch.randn(4, dtype=torch.float64)
    assert float((forward(Named(p), two) - forward(Named(p + 1), two)).abs().max()) > 0.01
    graph = traced(forward, (one,), p=p)
    blocked = Prover(graph).walk(graph.node_of["p"], ONE_BY_ONE).blocked
    assert blocked is not None and blocked.op == "core.batch" and "all samples" in blocked.why
    fixed = lambda m, x: F.batch_norm(torch.sin(x) + m.p.view(1, 4, 1), None, None, training=True)  # noqa: E731
    graph = traced(fixed, (one,), p=p)
    assert Prover(graph).walk(graph.node_of["p"], ONE_BY_ONE).proved


class Named:
    """A holder of p."""

    def __init__(self, p: Tensor) -> None:
        self.p = p
