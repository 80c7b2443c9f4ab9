"""A parameter that is read in disjoint slices is several parameters; any other reading keeps it one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Piece
from deadweight.graph.trace import trace

X = torch.randn(2, 3, 4, dtype=torch.float64)


class Reads(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w, self.read = nn.Parameter(torch.randn(shape, dtype=torch.float64)), forward

    def forward(self, x: Tensor) -> Any:
        return self.read(x, self.w)


def two_linear(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.tanh(x @ first.T) + torch.sin(x @ second.T)


DISJOINT = {
    "chunks": ((8, 4), lambda x, w: two_linear(x, *w.chunk(2)), {((0, 4), (0, 4)), ((4, 8), (0, 4))}),
    "slices": ((6, 4), lambda x, w: two_linear(x, w[:3], w[3:]), {((0, 3), (0, 4)), ((3, 6), (0, 4))}),
    "unequal parts": ((6, 4), lambda x, w: x @ w.split([1, 5])[1].T * (x @ w.split([1, 5])[0].T), None),
    "experts": (
        (2, 4, 4),
        lambda x, w: two_linear(x, w[0], w[1]),
        {((0, 1), (0, 4), (0, 4)), ((1, 2), (0, 4), (0, 4))},
    ),
    "columns": ((4, 8), lambda x, w: two_linear(x, w[:, :4], w[:, 4:]), {((0, 4), (0, 4)), ((0, 4), (4, 8))}),
}


@pytest.mark.parametrize(("shape", "read", "ranges"), DISJOINT.values(), ids=list(DISJOINT))
def test_disjoint_slices_become_parameters_and_the_function_stays(shape: Any, read: Any, ranges: Any) -> None:
    module = Reads(read, shape)
    graph = canonical(trace(module, (X,)))
    assert len(graph.parameters) == 2 and set(graph.parameters.values()) == {"w"}
    assert ranges is None or {piece.ranges for piece in graph.pieces.values()} == ranges
    (result,) = evaluate(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    torch.testing.assert_close(result, module(X).detach())


def test_a_slice_of_a_slice_is_a_slice_of_the_whole() -> None:
    module = Reads(lambda x, w: two_linear(x, *w[0].chunk(2)) + two_linear(x, *w[1].chunk(2)), (2, 8, 4))
    graph = canonical(trace(module, (X,)))
    stored = torch.arange(64).reshape(2, 8, 4)
    parts = [piece.of(stored) for piece in graph.pieces.values()]
    assert [p.shape for p in parts] == [(4, 4)] * 4 and len(torch.cat(parts).unique()) == 64
    assert Piece(((1, 2), (4, 8), (0, 4)), (0,)) in graph.pieces.values()


KEPT = {
    "read whole as well": ((8, 4), lambda x, w: two_linear(x, *w.chunk(2)) + w.sum()),
    "overlapping slices": ((6, 4), lambda x, w: two_linear(x, w[:4], w[2:])),
    "a rest that is not read": ((6, 4), lambda x, w: two_linear(x, w[:2], w[2:4])),
    "one slice alone": ((6, 4), lambda x, w: x @ w[:2].T),
    "every second row": ((6, 4), lambda x, w: two_linear(x, w[::2], w[1::2])),
    "returned": ((8, 4), lambda x, w: (two_linear(x, *w.chunk(2)), w)),
}


@pytest.mark.parametrize(("shape", "read"), KEPT.values(), ids=list(KEPT))
def test_any_other_reading_keeps_a_parameter_whole(shape: Any, read: Any) -> None:
    graph = canonical(trace(Reads(read, shape), (X,)))
    assert list(graph.parameters.values()) == ["w"] and not graph.pieces


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, need_weights=False)[0]


def test_attention_with_three_inputs_is_explained_to_the_last_dimension() -> None:
    result = deadweight.audit(Cross(), tuple(torch.randn(2, n, 8) for n in (5, 4, 4)), complete=True)
    assert result.completeness is not None
    assert result.completeness.measured == result.completeness.explained == 8 + 8 + 2 * 16 + 2 * 16
    named = {f.code: (f.parameter, f.slice) for f in result.findings}
    assert named["DW002"] == ("attention.in_proj_bias", ((8, 16),))
    assert named["DW009"] == ("attention.in_proj_weight", ((8, 16),))
    assert named["DW010"] == ("attention.in_proj_weight", ((16, 24),))
