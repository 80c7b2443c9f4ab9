"""Traps for the shift rules: each function lacks one condition of a rule, and calling its shift dead would be false.

The parameter is moved in float64 to see that the output really changes. Neighbours where the proof must succeed follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.search.prover import Prover

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0]])
INPUTS, PLACES = (X, TOKENS), torch.tensor([2, 0])
PER_OUTPUT = torch.arange(1, 13).reshape(1, 4, 3).expand(4, 4, 3)
ALIVE = 1e-3  # of outputs of order one; a dead shift changes them by 1e-15
DEAD = 1e-12


def scores(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1)


def over_positions(weights: Tensor, m: Any, x: Tensor) -> Tensor:
    """What a common shift of all values becomes is the same at all positions if the weights sum to one."""
    return torch.softmax(weights @ (torch.sin(x) + m.p), -2)


def six_keys(x: Tensor) -> Tensor:
    return torch.softmax(torch.cat([x @ x.mT, torch.sin(x) @ x.mT], -1), -1)


def first(m: Any) -> Tensor:
    return F.pad((-m.p)[:2], (0, 2))


def last(m: Any) -> Tensor:
    return F.pad((-m.p)[2:], (2, 0))


def chosen(x: Tensor, matrices: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index = (rows[:, 0] > 0).to(torch.int64)
    return torch.matmul(matrices[index], rows.unsqueeze(-1)).squeeze(-1)


def convolved(y: Tensor, kernel: Tensor, *, transposed: bool = False, groups: int = 1) -> Tensor:
    return torch.convolution(y, kernel, None, [1], [0], [1], transposed, [0], groups)


def packed(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True).data


def square(x: Tensor) -> Tensor:
    return x[0].mT @ x[0]


ONES, ONE_BY_ONE, SECOND = torch.ones(4, dtype=torch.int64), torch.arange(1, 5), torch.tensor([0, 1, 0])
SECOND_EXPERT = torch.where(torch.arange(4).reshape(4, 1, 1) == 1, torch.arange(1, 17).reshape(1, 4, 4), 0)
TRAPS: dict[str, tuple[Callable, Tensor]] = {
    "weights seen along the queries": (lambda m, x, i: over_positions(scores(x).transpose(1, 2), m, x), ONE_BY_ONE),
    "weights with one more axis, along the queries": (
        lambda m, x, i: over_positions(scores(x).unsqueeze(1).transpose(2, 3).squeeze(1), m, x),
        ONE_BY_ONE,
    ),
    "weights in another shape": (lambda m, x, i: over_positions(six_keys(x).reshape(2, 6, 3), m, x), ONE_BY_ONE),
    "weights that a tensor repeats or leaves out": (
        lambda m, x, i: over_positions(scores(x).repeat_interleave(torch.tensor([2, 0, 1]), -1), m, x),
        ONE_BY_ONE,
    ),
    "weights with an axis cut": (lambda m, x, i: over_positions(six_keys(x)[..., :3], m, x), ONE_BY_ONE),
    "weights times a number": (lambda m, x, i: over_positions(scores(x) * x[..., :1], m, x), ONE_BY_ONE),
    "weights of a sigmoid in another shape": (
        lambda m, x, i: over_positions(torch.sigmoid(x @ x.mT).unsqueeze(1).squeeze(1), m, x),
        ONE_BY_ONE,
    ),
    "weights of a sigmoid, permuted": (
        lambda m, x, i: over_positions(torch.sigmoid(x @ x.mT).permute(0, 2, 1), m, x),
        ONE_BY_ONE,
    ),
    "weights that are masked afterwards": (
        lambda m, x, i: over_positions(scores(x).masked_fill(x[..., :3] > 0, 0.0), m, x),
        ONE_BY_ONE,
    ),
    "one value of several": (lambda m, x, i: torch.tanh(scores(x) @ (x + m.p.view(3, 1))), SECOND),
    "the largest numbers": (
        lambda m, x, i: (x + m.p).amax(-1) - (9 * torch.sin(9 * x) + m.p).amax(-1),
        ONE_BY_ONE,
    ),
    "mean beside variance": (lambda m, x, i: torch.tanh(torch.var_mean(x + m.p, -1)[1]), ONES),
    "two that are shifted, the first only": (
        lambda m, x, i: torch.tanh(((x + first(m)) * (torch.sin(x) + last(m)))[..., :2]),
        ONE_BY_ONE,
    ),
    "two that are shifted, the second only": (
        lambda m, x, i: torch.tanh(((x + first(m)) * (torch.sin(x) + last(m)))[..., 2:]),
        ONE_BY_ONE,
    ),
    "the product of two shifts": (
        lambda m, x, i: torch.tanh(
            (x + m.p) @ (torch.sin(x) + m.p).mT - x @ (torch.sin(x) + m.p).mT - (x + m.p) @ torch.sin(x).mT
        ),
        ONE_BY_ONE,
    ),
    "a vector times a matrix": (lambda m, x, i: torch.tanh((x[0, 0] + m.p) @ square(x)), ONE_BY_ONE),
    "a matrix times a vector": (lambda m, x, i: torch.tanh(square(x) @ (x[0, 0] + m.p)), ONE_BY_ONE),
    "a vector as a weight": (lambda m, x, i: torch.tanh(F.linear(x + m.p, m.four)), ONE_BY_ONE),
    "a vector that is shifted as a weight": (lambda m, x, i: torch.tanh(F.linear(x, m.p)), ONE_BY_ONE),
    "a kernel and what it reads": (
        lambda m, x, i: torch.softmax(F.conv1d(x.mT + m.p[0, :, :1], m.p), 1),
        PER_OUTPUT,
    ),
    "a kernel of a transposed convolution": (
        lambda m, x, i: torch.softmax(convolved(x.mT, m.p, transposed=True), 1),
        PER_OUTPUT,
    ),
    "a kernel whose outputs move differently": (
        lambda m, x, i: torch.softmax(convolved(x.mT, m.p), 1),
        torch.arange(1, 49).reshape(4, 4, 3),
    ),
    "places that a mask chooses": (
        lambda m, x, i: torch.softmax((x + m.p)[x > 0], 0),
        ONE_BY_ONE,
    ),
    "a kernel in groups": (lambda m, x, i: torch.softmax(convolved(x.mT, m.p, groups=2), 1), PER_OUTPUT[:, :2]),
    "one expert of several": (lambda m, x, i: torch.tanh(chosen(x, m.p)), SECOND_EXPERT),
    "an axis of one number": (lambda m, x, i: torch.softmax(x[:, :1] + m.p, 1), ONE_BY_ONE),
}
PROVED: dict[str, tuple[Callable, Tensor]] = {
    "weights along the keys, turned": (
        lambda m, x, i: over_positions(torch.softmax(x @ x.mT, -2).transpose(1, 2), m, x),
        ONE_BY_ONE,
    ),
    "weights with one more axis": (lambda m, x, i: over_positions(scores(x).unsqueeze(1).squeeze(1), m, x), ONE_BY_ONE),
    "a mean of equals": (lambda m, x, i: torch.tanh((x + m.p).mean(1) - m.p), ONE_BY_ONE),
    "the largest of equals": (lambda m, x, i: torch.tanh((x + m.p).amax(1) - m.p), ONE_BY_ONE),
    "rows of sequences": (lambda m, x, i: torch.tanh(packed(x + m.p) - m.p), ONE_BY_ONE),
    "known places": (lambda m, x, i: torch.tanh((x + m.p)[..., PLACES] - m.p[PLACES]), ONE_BY_ONE),
    "places that data chooses, of equals": (
        lambda m, x, i: torch.tanh((x + m.p.view(2, 1, 1))[:, i[0]] - m.p.view(2, 1, 1)),
        torch.arange(1, 3),
    ),
    "experts that move alike": (
        lambda m, x, i: torch.tanh(chosen(x, m.p) - chosen(x, m.p.flip(0))),
        torch.arange(1, 17).reshape(1, 4, 4).expand(4, 4, 4),
    ),
}


def moved_by(graph: Graph, groups: Tensor) -> float:
    """By how much the outputs move when every group of p moves by an amount of its own."""
    values, bound = {n: t.detach() for n, t in graph.tensors.items()}, dict(zip(graph.inputs, INPUTS, strict=True))
    amounts = torch.randn(int(groups.max()) + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    amounts[0] = 0.0
    name = graph.node_of["p"]
    before = evaluate(graph, values, bound)
    after = evaluate(graph, {**values, name: values[name] + amounts[groups]}, bound)
    return max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("forward", "groups"), TRAPS.values(), ids=list(TRAPS))
def test_a_shift_with_one_condition_missing_is_alive(traced: Callable, forward: Callable, groups: Tensor) -> None:
    torch.manual_seed(0)
    graph = traced(forward, INPUTS, p=torch.randn(groups.shape), four=torch.randn(4))
    assert not Prover(graph).walk(graph.node_of["p"], groups).proved
    one_number = graph.nodes[graph.outputs[0]].shape == (2, 1, 4)  # dead in the example, alive in a longer one
    assert moved_by(graph, groups) > ALIVE or one_number


@pytest.mark.parametrize(("forward", "groups"), PROVED.values(), ids=list(PROVED))
def test_the_neighbour_with_all_conditions_is_dead(traced: Callable, forward: Callable, groups: Tensor) -> None:
    graph = traced(forward, INPUTS, p=torch.randn(groups.shape))
    assert Prover(graph).walk(graph.node_of["p"], groups).proved
    assert moved_by(graph, groups) < DEAD


def test_a_factor_of_many_powers_of_two_empties_no_label(traced: Callable) -> None:
    """A label times 2⁶² keeps two bits: one of four would be 0."""
    forward = lambda m, x, i: torch.tanh(torch.add(x[..., :1], x[..., :1] + m.p, alpha=1 << 62))  # noqa: E731
    graph = traced(forward, INPUTS, p=torch.randn(16))
    for place in range(16):
        groups = torch.where(torch.arange(16) == place, place + 1, 0)
        assert not Prover(graph).walk(graph.node_of["p"], groups).proved
