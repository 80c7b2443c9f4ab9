"""EmbeddingBag spelled out gives what the operation gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

FLAT, STARTS = torch.randint(0, 11, (12,)), torch.tensor([0, 4, 4, 9])  # the second bag is empty
SQUARE = torch.randint(0, 11, (3, 5))
WEIGHTS = torch.randn(12)
CASES: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], bool]] = {
    "mean": ({"mode": "mean"}, (SQUARE,), True),
    "sum": ({"mode": "sum"}, (SQUARE,), True),
    "padding": ({"mode": "mean", "padding_idx": int(SQUARE[0, 0])}, (SQUARE,), True),
    "padding from the end": ({"mode": "sum", "padding_idx": int(SQUARE[0, 0]) - 11}, (SQUARE,), True),
    "offsets": ({"mode": "mean"}, (FLAT, STARTS), True),
    "last offset": ({"mode": "sum", "include_last_offset": True}, (FLAT, torch.tensor([0, 4, 9, 12])), True),
    "weights": ({"mode": "sum"}, (FLAT, STARTS, WEIGHTS), True),
    "max": ({"mode": "max"}, (SQUARE,), False),
}


@pytest.mark.parametrize(("options", "inputs", "spelled_out"), CASES.values(), ids=list(CASES))
def test_a_bag_spelled_out_is_the_same_function(options: dict, inputs: tuple[Tensor, ...], spelled_out: bool) -> None:
    module = nn.EmbeddingBag(11, 3, **options)
    graph = canonical(trace(module, inputs))
    assert ("bag" in {n.op for n in graph.nodes.values()}) == spelled_out
    values = {n: t.detach() for n, t in graph.tensors.items()}
    (out,) = evaluate(graph, values, bind(graph, inputs, {}))
    module = module.double()
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    assert torch.allclose(out, module(*given), rtol=0, atol=1e-14)  # a sum of at most 12 terms of order 1
