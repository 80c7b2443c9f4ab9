"""Which parameter is the weight of a map: used whole, of real numbers, and not what the map reads as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deadweight.proof.weights import uses_of, weight_view

X = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

# m, x → a map of w or of the kernel, and the axes of its outputs and inputs
MAPS: dict[str, tuple[Callable, tuple[int, int] | None]] = {
    "a map": (lambda m, x: F.linear(x, m.w), (0, 1)),
    "a map, transposed": (lambda m, x: F.linear(x, m.w.t()), (1, 0)),
    "a map of what is computed from it": (lambda m, x: F.linear(torch.sin(m.w), m.w), (0, 1)),
    "a map that reads itself": (lambda m, x: F.linear(m.w, m.w), None),
    "a map that reads itself in another shape": (lambda m, x: F.linear(m.w.reshape(2, 2, 4), m.w), None),
    "a map that reads itself transposed": (lambda m, x: F.linear(m.w.t(), m.w), None),
    "a vector": (lambda m, x: F.linear(x, m.vector), None),
    "a matrix that is computed": (lambda m, x: F.linear(x, torch.sin(m.w)), None),
    "a kernel": (lambda m, x: F.conv1d(x, m.kernel), (0, 1)),
    "a kernel that reads itself": (lambda m, x: F.conv1d(m.kernel, m.kernel), None),
    "a kernel in groups": (lambda m, x: F.conv1d(x, m.pairs, groups=2), None),
    "a kernel that is computed": (lambda m, x: F.conv1d(x, torch.sin(m.kernel)), None),
    "a kernel without a batch": (lambda m, x: F.conv1d(x[0], m.kernel), None),
}


@pytest.mark.parametrize(("forward", "axes"), MAPS.values(), ids=list(MAPS))
def test_a_weight_is_used_whole_and_read_as_nothing_else(
    traced: Callable, forward: Callable, axes: tuple[int, int] | None
) -> None:
    shapes = {"w": (4, 4), "vector": (4,), "kernel": (4, 4, 1), "pairs": (4, 2, 1)}
    graph = traced(forward, (X,), **{name: torch.randn(shape) for name, shape in shapes.items()})
    node = next(n for n in graph.nodes.values() if n.op == "linear" or "conv" in n.op)
    view = weight_view(graph, node)
    assert (None if view is None else (view.output, view.input)) == axes


def test_whole_numbers_are_no_weight(traced: Callable) -> None:
    counts = nn.Parameter(torch.arange(16).reshape(4, 4), requires_grad=False)
    graph = traced(lambda m, x: F.linear(x.to(torch.int64), m.counts) + x, (X,), counts=counts)
    node = next(n for n in graph.nodes.values() if n.op == "linear")
    assert weight_view(graph, node) is None


def test_the_uses_of_a_parameter_are_what_computes_with_it(traced: Callable) -> None:
    graph = traced(lambda m, x: F.linear(torch.tanh(m.w.t()), m.w), (X,), w=torch.randn(4, 4))
    assert sorted(graph.nodes[n].op for n in uses_of(graph, graph.node_of["w"])) == ["aten.tanh", "linear"]
