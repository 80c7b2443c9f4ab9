"""Spelled-out operations lay their result out in memory as torch's own kernels do: code behind asks for views."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import TraceError, trace

BATCH, HEADS, LENGTH, SIZE = 2, 4, 5, 6


def heads_first(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, SIZE)).transpose(1, 2).contiguous()


def heads_transposed(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, SIZE)).transpose(1, 2)


def heads_in_the_batch(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, SIZE)).transpose(1, 2).flatten(0, 1)


class Attention(nn.Module):
    """Fused attention, then a view that only exists for the layout of its result."""

    def __init__(self, split: Callable, view: Callable, key_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.split, self.view, self.key_heads, self.options = split, view, key_heads, options
        self.query = nn.Linear(8, HEADS * SIZE)
        self.key, self.value = nn.Linear(8, key_heads * SIZE), nn.Linear(8, key_heads * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.query(x), HEADS)
        k, v = (self.split(layer(x), self.key_heads) for layer in (self.key, self.value))
        return self.view(F.scaled_dot_product_attention(q, k, v, **self.options))


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).view(BATCH, LENGTH, HEADS * SIZE)


def copied(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().view(BATCH, LENGTH, HEADS * SIZE)


def flat(y: Tensor) -> Tensor:
    return y.view(BATCH, -1)


VIEWED: dict[str, Callable[[], nn.Module]] = {
    "transposed from (batch, length, heads, size)": lambda: Attention(heads_transposed, joined),
    "transposed, then copied": lambda: Attention(heads_transposed, copied),
    "contiguous": lambda: Attention(heads_first, flat),
    "contiguous, then copied": lambda: Attention(heads_first, copied),
    "three axes": lambda: Attention(heads_in_the_batch, flat),
    "grouped keys": lambda: Attention(heads_transposed, joined, 2, enable_gqa=True),
    "contiguous grouped keys": lambda: Attention(heads_first, flat, 2, enable_gqa=True),
    "causal": lambda: Attention(heads_transposed, joined, is_causal=True),
    "with a mask": lambda: Attention(heads_transposed, joined, attn_mask=torch.ones(LENGTH, LENGTH).tril().bool()),
}


@pytest.mark.parametrize("build", VIEWED.values(), ids=list(VIEWED))
def test_a_view_behind_fused_attention_is_traced(build: Callable[[], nn.Module]) -> None:
    module, x = build().eval(), torch.randn(BATCH, LENGTH, 8)
    graph = trace(module, (x,))
    expected = copy.deepcopy(module).double()(x.double())
    for result in (graph, canonical(graph)):
        (out,) = evaluate(result, result.tensors, bind(result, (x,), {}))
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "build", [lambda: Attention(heads_transposed, flat), lambda: Attention(heads_first, joined)], ids=["flat", "joined"]
)
def test_a_view_that_does_not_exist_is_refused_as_torch_does(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TraceError, match="view"):
        trace(build().eval(), (torch.randn(BATCH, LENGTH, 8),))


class Contracted(nn.Module):
    def __init__(self, equation: str, view: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.equation, self.view = nn.Parameter(torch.randn(6, 4, 3)), equation, view

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.weight).view(self.view)


@pytest.mark.parametrize("equation", ["bid,dhe->bihe", "bid,dhe->bhie"])
def test_a_view_behind_einsum_is_traced_where_torch_has_one(equation: str) -> None:
    x = torch.randn(2, 5, 6)
    shape = (10, 12) if equation.endswith("bihe") else tuple(torch.einsum(equation, x, torch.randn(6, 4, 3)).shape)
    assert trace(Contracted(equation, shape), (x,)).nodes


def test_the_copy_into_the_layout_is_no_operation_of_the_canonical_graph() -> None:
    graph = canonical(trace(Attention(heads_transposed, joined).eval(), (torch.randn(BATCH, LENGTH, 8),)))
    assert not {"aten.copy", "aten.empty_permuted"} & {n.op for n in graph.nodes.values()}
