"""Derivatives along a motion: linear operations run on the motion itself give what torch's forward mode gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def packed(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(x, [4, 3, 3], batch_first=True).data


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a bias and a linear map": lambda x, p: (x + p[0]) @ W.T,
    "a bias, a linear map and another shape": lambda x, p: ((x + p[0]) @ W.T).flatten(1).tanh(),
    "an expanded parameter": lambda x, p: (x + p.expand(3, 4, 4)).tanh(),
    "a parameter beside data": lambda x, p: torch.cat([p.expand(3, 4, 4), x], 1) @ W,
    "stacked": lambda x, p: torch.stack([x, x + p]).sum(0),
    "a difference with a factor": lambda x, p: torch.sub(x, p, alpha=3) - (p - x),
    "both factors": lambda x, p: (x + p) * (x - p),
    "both sides of a product": lambda x, p: (x + p) @ (x + p).mT,
    "the divisor": lambda x, p: x / (p.square() + 1),
    "pieces": lambda x, p: torch.cat([q.exp() for q in (x + p).chunk(2, -1)], -1),
    "picked rows": lambda x, p: (x + p)[:, torch.tensor([2, 0, 2])].mean(1),
    "a quotient that is rounded": lambda x, p: torch.div(x + p, 0.3, rounding_mode="floor") + p,
    "dividend and divisor": lambda x, p: (x + p) / (p.square() + 1),
    "the largest": lambda x, p: (x + p).topk(2, -1)[0] * x[..., :2],
    "packed": lambda x, p: packed(x + p) * 2.0,
    "one value on both sides": lambda x, p: (h := x + p) @ h * h,
    "a softmax": lambda x, p: torch.softmax(x @ p, -1) @ (x + p),
    "a convolution": lambda x, p: torch.conv1d(x + p[:, :1], p.reshape(4, 4, 1)),
    "repeated": lambda x, p: (x + p[0].repeat(3, 4, 1)).reshape(3, 16).relu(),
    "negative": lambda x, p: -(x * p).transpose(1, 2).flatten(1),
}


class Reads(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.p)


@pytest.mark.parametrize("name", CASES)
def test_a_motion_is_followed_as_forward_mode_follows_it(name: str) -> None:
    graph = canonical(trace(Reads(CASES[name]), (torch.randn(3, 4, 4),)), pieces=False)
    source = graph.node_of["p"]
    values = {n: t.detach().double() if t.is_floating_point() else t for n, t in graph.tensors.items()}
    inputs = {graph.inputs[0]: torch.randn(3, 4, 4, dtype=torch.float64)}
    motion, found = torch.randn(4, 4, dtype=torch.float64), dict[str, Tensor]()

    def take(node: object, tangent: Tensor) -> bool:
        found[node.name] = tangent  # type: ignore[attr-defined]
        return False

    Point(graph, values, inputs).tangents({source: motion}, graph.nodes, take)

    def outputs(p: Tensor) -> Tensor:
        return evaluate(graph, values | {source: p}, inputs)[0]

    expected = torch.func.jvp(outputs, (values[source],), (motion,))[1]
    assert torch.allclose(found[graph.outputs[0]].expand(expected.shape), expected, rtol=0, atol=1e-12)
