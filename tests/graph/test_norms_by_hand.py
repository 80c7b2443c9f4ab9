"""Norms that a model spells out in arithmetic are recognised, and their near misses are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.gain = norm, nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.norm(x)


def once(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def twice(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)


def over_positions(x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def of_another(x: Tensor) -> Tensor:
    centred = x - x.roll(1, -1).square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def not_centred_above(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5)


def drawn_twice(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt((x - x.mean(1, keepdim=True)).pow(2).mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("norm", "op"),
    [
        (once, "core.layer"),
        (twice, "core.layer"),
        (over_positions, "core.rms"),  # of what is centred along positions
        (of_another, "core.rms"),
        (not_centred_above, None),
        (drawn_twice, None),
    ],
)
def test_a_norm_is_what_its_arithmetic_says(norm: Callable[[Tensor], Tensor], op: str | None) -> None:
    module = Written(norm)
    graph = canonical(trace(module, (X,)))
    cores = [n.op for n in graph.nodes.values() if n.op.startswith("core.")]
    assert cores == ([] if op is None else [op])
    (out,) = evaluate(graph, dict(graph.tensors), {graph.inputs[0]: X})
    assert torch.allclose(out, module(X), rtol=0, atol=1e-13)  # numbers of order one, six terms
