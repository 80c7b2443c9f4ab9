"""Which values are the same for every input: only those may be computed ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.constants import constant_value
from deadweight.graph.trace import trace

PLACES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "counted": (lambda x: torch.arange(x.shape[0]).flip(0), True),
    "written down": (lambda x: torch.tensor([1, 0, 2]), True),
    "shuffled": (lambda x: torch.randperm(x.shape[0]), False),
    "drawn": (lambda x: torch.randint(0, x.shape[0], (2,)), False),
    "ranked": (lambda x: x.argsort(), False),
}


class Picked(nn.Module):
    def __init__(self, places: Callable) -> None:
        super().__init__()
        self.weight, self.places = nn.Parameter(torch.randn(3)), places

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[self.places(x)]


@pytest.mark.parametrize(("places", "known"), PLACES.values(), ids=list(PLACES))
def test_places_drawn_at_random_are_no_constants(places: Callable, known: bool) -> None:
    graph = canonical(trace(Picked(places), (torch.randn(3),)))
    (index,) = [n for n in graph.nodes.values() if n.op == "aten.index"]
    assert (constant_value(graph, index.args[1][0].name) is not None) == known


def buckets(x: Tensor) -> Tensor:
    """Distances, the far ones cut: min with a constant that takes its shape from the distances."""
    distance = (torch.arange(x.shape[0])[None] - torch.arange(x.shape[0])[:, None]).abs()
    return torch.min(distance, torch.full_like(distance, 4))


def test_a_tensor_that_takes_its_shape_from_a_constant_grows_with_it() -> None:
    """The rows that longer sequences look up in a table of distances are known."""
    graph = canonical(trace(Looked(buckets), (torch.randn(3),)))
    (lookup,) = [n for n in graph.nodes.values() if n.op == "aten.embedding"]
    longer = constant_value(graph, lookup.args[1].name, stretch=9)
    assert longer is not None and longer.tolist() == buckets(torch.zeros(9)).tolist()


def test_a_tensor_that_takes_its_shape_from_an_input_is_a_constant() -> None:
    graph = canonical(trace(Looked(lambda x: torch.ones_like(x, dtype=torch.int64)), (torch.randn(3),)))
    (lookup,) = [n for n in graph.nodes.values() if n.op == "aten.embedding"]
    assert graph.depends[lookup.args[1].name] == (False, False)


class Looked(nn.Module):
    def __init__(self, places: Callable) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 2), places

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.places(x)) + x.sum()
