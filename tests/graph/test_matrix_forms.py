"""A parameter of many axes that is read as one matrix is that matrix; its bias is a vector, added before the view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

X = torch.randn(2, 3, 4, dtype=torch.float64)


class Reads(nn.Module):
    def __init__(self, forward: Callable, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.read = forward
        self.w = nn.ParameterList([torch.randn(shape, dtype=torch.float64) for shape in shapes])

    def forward(self, x: Tensor) -> Any:
        return self.read(x, *self.w)


def split(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("btd,hdk->bthk", x, w)


FORMS: dict[str, tuple[Callable, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "heads written": (lambda x, w: split(x, w), [(2, 4, 5)], [(10, 4)]),
    "heads read": (lambda x, w: torch.einsum("bthk,hkd->btd", x.view(2, 3, 2, 2), w), [(2, 2, 7)], [(7, 4)]),
    "four axes": (lambda x, w: torch.einsum("btd,nhkd->nbhtk", x, w), [(3, 2, 5, 4)], [(30, 4)]),
    "with a bias": (lambda x, w, b: split(x, w) + b, [(2, 4, 5), (2, 5)], [(10, 4), (10,)]),
    "with a bias that has been moved": (
        lambda x, w, b: split(x, w).permute(0, 3, 2, 1) + b,
        [(2, 4, 5), (5, 2, 1)],
        [(10, 4), (10,)],
    ),
    "twice": (lambda x, w: split(torch.tanh(split(x, w).mean(2)), w), [(2, 4, 4)], [(8, 4)]),
    "a flat vector": (lambda x, w: x @ w.view(4, 5), [(20,)], [(5, 4)]),
    "a piece": (lambda x, w: split(x, w[0]) * split(x, w[1]), [(2, 2, 4, 5)], [(10, 4), (10, 4)]),
}


@pytest.mark.parametrize(("read", "stored", "forms"), FORMS.values(), ids=list(FORMS))
def test_what_is_read_as_a_matrix_is_one_and_the_function_stays(read: Callable, stored: list, forms: list) -> None:
    module = Reads(read, *stored)
    graph = canonical(trace(module, (X,)))
    assert sorted(graph.nodes[n].shape for n in graph.parameters) == sorted(forms)
    for node, piece in graph.pieces.items():
        torch.testing.assert_close(piece.of(module.get_parameter(graph.parameters[node])), graph.tensors[node])
    (result,) = evaluate(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    torch.testing.assert_close(result, module(X).detach())


KEPT: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "read as two matrices": (lambda x, w: x @ w.view(4, 10) + (x @ w.permute(1, 0, 2).reshape(4, 10)), [(2, 4, 5)]),
    "read whole, too": (lambda x, w: split(x, w) + w.sum(), [(2, 4, 5)]),
    "returned": (lambda x, w: (split(x, w), w), [(2, 4, 5)]),
    "a matrix": (lambda x, w: x @ w, [(4, 5)]),
    "a bias of the heads alone": (lambda x, w, b: split(x, w) + b, [(2, 4, 5), (2, 1)]),
    "a bias that positions share in part": (lambda x, w, b: split(x, w) + b, [(2, 4, 5), (3, 2, 5)]),
}


@pytest.mark.parametrize(("read", "stored"), KEPT.values(), ids=list(KEPT))
def test_any_other_reading_keeps_the_form(read: Callable, stored: list) -> None:
    module = Reads(read, *stored)
    graph = canonical(trace(module, (X,)))
    last = list(graph.parameters)[-1]
    assert graph.nodes[last].shape == stored[-1] and last not in graph.pieces
    result = evaluate(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    torch.testing.assert_close(result[0], (out[0] if isinstance(out := module(X), tuple) else out).detach())
