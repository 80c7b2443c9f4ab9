"""Scales followed back to parameters: whatever the walk says to scale makes up for the factor, and traps stop it.

Every function multiplies some value by the factor f. Parameters are scaled as the walk says and f is divided by the
same numbers: the outputs must stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.graph.evaluate import evaluate, largest_difference
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.scale_back import ScaleBack, can_be_scaled
from deadweight.proof.steps import Blocked

SEED = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 4, generator=SEED, dtype=torch.float64)
SQUARE = torch.randn(2, 4, 4, generator=SEED, dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0]])
MASK = torch.tensor([True, False, False, True])
EXACT = 1e-12  # of outputs of order one: float64 rounds at about 1e-16


def twice(h: Tensor) -> Tensor:
    return torch.cat([h, h], -1)


def convolve(x: Tensor, kernel: Tensor, *, transposed: bool = False, groups: int = 1) -> Tensor:
    return torch.convolution(x, kernel, None, [1], [0], [1], transposed, [0], groups)


def parts() -> dict[str, Any]:
    return {
        "f": torch.rand(4, generator=SEED) + 0.5,
        "one": torch.rand((), generator=SEED) + 0.5,
        "each": torch.rand(3, 1, generator=SEED) + 0.5,
        "wide": torch.rand(8, generator=SEED) + 0.5,
        "w": nn.Linear(4, 4, bias=False),
        "v": nn.Linear(4, 4),
        "big": nn.Linear(4, 8),
        "p": torch.randn(4, generator=SEED),
        "rows": torch.randn(3, 4, generator=SEED),
        "table": torch.randn(3, 4, generator=SEED),
        "kernel": torch.randn(4, 4, 1, generator=SEED),
        "halves": torch.randn(4, 2, 1, generator=SEED),
        "matrix": torch.randn(4, 4, generator=SEED),
        "stack": torch.randn(2, 4, 4, generator=SEED),
        "counts": nn.Parameter(torch.arange(1, 5), requires_grad=False),
    }


# (m, x, i) → outputs; the parameters that the walk scales
HOLDS: dict[str, tuple[Callable, set[str]]] = {
    "a kernel of a transposed convolution": (
        lambda m, x, i: torch.tanh(convolve(x.mT, m.kernel, transposed=True).mT * m.f),
        {"kernel"},
    ),
    "a linear map": (lambda m, x, i: torch.tanh(m.w(x) * m.f), {"w.weight"}),
    "a linear map and its bias": (lambda m, x, i: torch.tanh(m.v(x) * m.f), {"v.weight", "v.bias"}),
    "one number for all": (lambda m, x, i: torch.tanh(m.v(x) * m.one), {"v.weight", "v.bias"}),
    "a difference": (lambda m, x, i: torch.tanh((m.w(x) - m.p) * m.f), {"w.weight", "p"}),
    "a sum that broadcasts": (lambda m, x, i: torch.tanh((m.rows + m.p) * m.f + x), {"rows", "p"}),
    "ReLU of an opposite": (lambda m, x, i: torch.tanh((-m.w(x)).relu() * m.f), {"w.weight"}),
    "a leaky ReLU": (lambda m, x, i: torch.tanh(torch.nn.functional.leaky_relu(m.w(x)) * m.f), {"w.weight"}),
    "an absolute value": (lambda m, x, i: torch.tanh(m.w(x).abs() * m.f), {"w.weight"}),
    "zeros in masked places": (
        lambda m, x, i: torch.tanh(m.w(x).masked_fill(MASK, 0.0) * m.f),
        {"w.weight"},
    ),
    "minus infinity in masked places": (
        lambda m, x, i: torch.softmax(m.w(x).masked_fill(MASK, float("-inf")) * m.f, -1),
        {"w.weight"},
    ),
    "a product with data": (lambda m, x, i: torch.tanh(torch.sin(x) * m.w(x) * m.f), {"w.weight"}),
    "a product with data behind it": (lambda m, x, i: torch.tanh(m.w(x) * torch.sin(x) * m.f), {"w.weight"}),
    "a number times a value": (lambda m, x, i: torch.tanh(2.0 * m.w(x) * m.f), {"w.weight"}),
    "a quotient by data": (lambda m, x, i: torch.tanh(m.w(x) / x * m.f), {"w.weight"}),
    "a quotient by a parameter": (lambda m, x, i: torch.tanh(m.w(x) / m.p * m.f), {"w.weight"}),
    "a table": (lambda m, x, i: torch.tanh(F.embedding(i, m.table) * m.f), {"table"}),
    "rows of weighted sums": (
        lambda m, x, i: torch.tanh(torch.softmax(x @ x.mT, -1) @ m.w(x) * m.f),
        {"w.weight"},
    ),
    "scores, by their queries": (lambda m, x, i: torch.tanh((m.rows @ m.w(x).mT) * m.each), {"rows"}),
    "scores of data": (lambda m, x, i: torch.tanh((torch.sin(x) @ m.matrix) * m.f), {"matrix"}),
    "a vector times a matrix": (lambda m, x, i: torch.tanh((m.p @ m.matrix) * m.f + x), {"matrix"}),
    "a sum over positions": (lambda m, x, i: torch.tanh(m.w(x).sum(1) * m.f), {"w.weight"}),
    "a mean over positions": (lambda m, x, i: torch.tanh(m.w(x).mean((0, 1), keepdim=True) * m.f), {"w.weight"}),
    "a sum over everything": (lambda m, x, i: torch.tanh(m.v(x).sum() * m.one + x), {"v.weight", "v.bias"}),
    "half of a map": (lambda m, x, i: torch.tanh(m.big(x).neg()[..., :4] * m.f), {"big.weight", "big.bias"}),
    "half of a map, the other read as it is": (
        lambda m, x, i: torch.tanh((h := m.big(x).neg())[..., :4] * m.f) * torch.sin(h[..., 4:]),
        {"big.weight", "big.bias"},
    ),
    "a part of a split, another read as it is": (
        lambda m, x, i: torch.tanh((h := m.big(x).neg().split([4, 2, 2], -1))[0] * m.f) * torch.sin(h[1][..., :1]),
        {"big.weight", "big.bias"},
    ),
    "a view that something else reads in part": (
        lambda m, x, i: torch.tanh((h := m.big(x).neg().unflatten(-1, (2, 4)))[..., 0, :] * m.f) + h[..., 1, :],
        {"big.weight", "big.bias"},
    ),
    "a kernel": (lambda m, x, i: torch.tanh(convolve(x.mT, m.kernel).mT * m.f), {"kernel"}),
    "a kernel in groups": (lambda m, x, i: torch.tanh(convolve(x.mT, m.halves, groups=2).mT * m.f), {"halves"}),
    "values side by side": (
        lambda m, x, i: torch.tanh(torch.cat([m.w(x), m.v(x)], 0) * m.f),
        {"w.weight", "v.weight", "v.bias"},
    ),
    "values repeated": (lambda m, x, i: torch.tanh(m.p.expand(3, 4) * m.f + x), {"p"}),
}

# The op that stands in the way.
STOPS: dict[str, tuple[Callable, str]] = {
    "the value is read elsewhere": (lambda m, x, i: torch.tanh((h := m.w(x)) * m.f) + torch.sin(h), "linear"),
    "the value is returned": (lambda m, x, i: (torch.tanh((h := m.w(x)) * m.f), h), "linear"),
    "a part is returned": (lambda m, x, i: (torch.tanh((h := m.w(x).neg()) * m.f), h[..., :1]), "aten.neg"),
    "a constant is added": (lambda m, x, i: torch.tanh((m.w(x) + 1.0) * m.f), "aten.add"),
    "data is added": (lambda m, x, i: torch.tanh((m.w(x) + x) * m.f), "input"),
    "whole numbers are added": (lambda m, x, i: torch.tanh((m.w(x) + m.counts) * m.f), "parameter"),
    "a function that is not homogeneous": (lambda m, x, i: torch.tanh(torch.tanh(m.w(x)) * m.f), "aten.tanh"),
    "one element for two numbers": (lambda m, x, i: torch.tanh(twice(m.w(x)) * m.wide), "aten.cat"),
    "one element for two numbers, repeated": (
        lambda m, x, i: torch.tanh(m.p.repeat(2) * m.wide + x[0, 0, 0]),
        "aten.repeat",
    ),
    "two rows of one parameter": (lambda m, x, i: torch.tanh(m.p.expand(3, 4) * m.each + x), "aten.expand"),
    "a bias for all positions": (lambda m, x, i: torch.tanh((m.rows + m.p) * m.each + x), "aten.add"),
    "a number in masked places": (lambda m, x, i: torch.tanh(m.w(x).masked_fill(MASK, 1.0) * m.f), "aten.masked_fill"),
    "a tensor in masked places": (
        lambda m, x, i: torch.tanh(m.w(x).masked_fill(MASK, m.one) * m.f),
        "aten.masked_fill",
    ),
    "a mask of what is scaled": (
        lambda m, x, i: torch.tanh((h := m.w(x).neg()).masked_fill(h > 1.0, 0.0) * m.f),
        "aten.neg",
    ),
    "a square": (lambda m, x, i: torch.tanh((h := m.w(x)) * h * m.f), "aten.mul"),
    "both factors of one map": (lambda m, x, i: torch.tanh((h := m.w(x)).relu() * h * m.f), "linear"),
    "a number times data": (lambda m, x, i: torch.tanh(x * 2.0 * m.f), "input"),
    "a map that is split elsewhere": (
        lambda m, x, i: torch.tanh((h := m.w(x).neg()) * m.f) + torch.sin(h.chunk(2, -1)[0]).sum(),
        "aten.neg",
    ),
    "a map beside others elsewhere": (
        lambda m, x, i: torch.tanh((h := m.w(x).neg()) * m.f) + torch.sin(torch.cat([x, h], -1)).sum(),
        "aten.neg",
    ),
    "stacks of data times a vector": (lambda m, x, i: torch.tanh((SQUARE @ m.p) * m.one + x[0, 0]), "aten.matmul"),
    "a vector of data times stacks": (lambda m, x, i: torch.tanh((x[0, 0] @ m.stack) * m.f), "aten.matmul"),
    "a divisor": (lambda m, x, i: torch.tanh(x / m.w(x) * m.f), "input"),
    "a quotient that is rounded": (
        lambda m, x, i: torch.tanh(torch.div(m.w(x), 0.3, rounding_mode="floor") * m.f),
        "aten.div",
    ),
    "a map that reads itself": (lambda m, x, i: torch.tanh(F.linear(m.w.weight, m.w.weight) * m.f), "linear"),
    "rows of a map by position": (lambda m, x, i: torch.tanh(m.w(x) * m.each), "linear"),
    "a vector as a weight": (lambda m, x, i: torch.tanh(F.linear(SQUARE, m.p) * m.f) + x[0, 0], "linear"),
    "a table by position": (lambda m, x, i: torch.tanh(F.embedding(i, m.table) * m.each), "aten.embedding"),
    "a matrix times a vector": (lambda m, x, i: torch.tanh((m.matrix @ m.p) * m.f + x), "aten.matmul"),
    "columns of a product whose rows are learned": (
        lambda m, x, i: torch.tanh((-m.matrix @ SQUARE) * m.f),
        "aten.matmul",
    ),
    "a sum over what is scaled apart": (
        lambda m, x, i: torch.tanh((m.rows + m.p).sum(1, keepdim=True) * m.each + x),
        "aten.add",
    ),
    "a kernel of a transposed convolution in groups": (
        lambda m, x, i: torch.tanh(convolve(x.mT, m.kernel[:, :2], transposed=True, groups=2).mT * m.f),
        "aten.convolution",
    ),
    "a kernel without a batch": (
        lambda m, x, i: torch.tanh(F.conv1d(SQUARE[0], m.kernel) * m.f + x[0, 0]),
        "aten.conv1d",
    ),
    "one of the largest": (lambda m, x, i: torch.tanh(m.w(x).topk(2, -1)[0] * m.one), "getitem"),
}


def walked(traced: Callable, forward: Callable) -> tuple[Graph, Node, ScaleBack, Tensor]:
    """The graph, the factor's parameter, and a walk that has not begun."""
    graph = traced(forward, (X, TOKENS), **parts())
    factor = next(graph.nodes[graph.node_of[n]] for n in ("f", "one", "each", "wide") if is_read(graph, n))
    product = next(n for n in graph.nodes.values() if n.op == "aten.mul" and Ref(factor.name) in n.args)
    value = next(a.name for a in product.args if a != Ref(factor.name))
    labels = torch.arange(1, torch.Size(factor.shape).numel() + 1).reshape(factor.shape).expand(product.shape)
    return graph, factor, ScaleBack(graph, can_be_scaled(graph), product, value, labels), labels


def is_read(graph: Graph, name: str) -> bool:
    return name in graph.node_of and bool(graph.users[graph.node_of[name]])


def change(graph: Graph, factor: Node, scaled: dict[str, Tensor]) -> float:
    """By how much the outputs change when the factor is divided by what multiplies the parameters."""
    values = {n: t.detach() for n, t in graph.tensors.items()}
    inputs = dict(zip(graph.inputs, (X, TOKENS), strict=True))
    numbers = torch.rand(torch.Size(factor.shape).numel(), generator=SEED, dtype=torch.float64) + 0.5
    one = torch.cat([torch.ones(1, dtype=torch.float64), numbers])
    moved = {name: values[name] * one[labels.clamp_min(0)] for name, labels in scaled.items()}
    moved[factor.name] = values[factor.name] / numbers.reshape(factor.shape)
    return largest_difference(evaluate(graph, values, inputs), evaluate(graph, values | moved, inputs))


@pytest.mark.parametrize(("forward", "names"), HOLDS.values(), ids=list(HOLDS))
def test_what_is_scaled_makes_up_for_the_factor(traced: Callable, forward: Callable, names: set[str]) -> None:
    graph, factor, walk, _ = walked(traced, forward)
    walk.run()
    assert {graph.parameters[n] for n, labels in walk.scaled.items() if bool((labels > 0).any())} == names
    assert change(graph, factor, walk.scaled) < EXACT


@pytest.mark.parametrize(("forward", "op"), STOPS.values(), ids=list(STOPS))
def test_what_cannot_be_scaled_stops_the_walk(traced: Callable, forward: Callable, op: str) -> None:
    _, _, walk, _ = walked(traced, forward)
    with pytest.raises(Blocked) as stopped:
        walk.run()
    assert stopped.value.op == op
