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
