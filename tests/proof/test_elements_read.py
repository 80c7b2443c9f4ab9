"""Which elements of a parameter are read, held against the gradients of the module itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.proof import elements_read as reading

GENERATOR = torch.Generator().manual_seed(0)
TOKENS, WIDTH = 11, 6
X = torch.randn(2, TOKENS, WIDTH, generator=GENERATOR, dtype=torch.float64)
EVEN = torch.tensor([0, 2, 4])


class Parts(nn.Module):
    """A weight, two biases, a factor per channel and one per token; what becomes of them is the case's."""

    def __init__(self, forward: Callable[[Parts, Tensor], Tensor]) -> None:
        super().__init__()
        draw = lambda *shape: nn.Parameter(torch.randn(shape, generator=GENERATOR, dtype=torch.float64))  # noqa: E731
        self.weight, self.bias, self.other = draw(8, WIDTH), draw(8), draw(WIDTH, 8)
        self.factor, self.token, self.one = draw(8), draw(TOKENS, 1), draw(1)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def map(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def masks_and_gradients(forward: Callable, x: Tensor = X) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each parameter that something reads, the elements that count as read, and those with a gradient."""
    module = Parts(forward)
    graph = canonical(trace(module, (x,)))
    masks = reading.elements_read(graph)
    module(x).sin().sum().backward()
    result = {}
    for name, parameter in module.named_parameters():
        node = graph.node_of.get(name)
        if parameter.grad is not None and node is not None:
            everything = torch.ones(parameter.shape, dtype=torch.bool)
            result[name] = (masks.get(node, everything), parameter.grad != 0)
    assert result
    return result


EXACT = {
    "slice": lambda m, x: m.map(x)[..., :3],
    "two slices that overlap": lambda m, x: m.map(x)[..., :2].sum(-1) + m.map(x)[..., 1:3].sum(-1),
    "one value, two slices": lambda m, x: (h := m.map(x))[..., :2].sin() + h[..., 4:6].cos(),
    "a slice and the whole": lambda m, x: (h := m.map(x))[..., :2].sin() + h.exp().sum(-1, keepdim=True),
    "the whole and a slice": lambda m, x: (h := m.map(x)).exp().sum(-1, keepdim=True) + h[..., :2].sin(),
    "one part twice": lambda m, x: (p := m.map(x).chunk(2, -1)[0])[..., :1] + p[..., 2:3],
    "one part, and a slice of it": lambda m, x: (p := m.map(x).chunk(2, -1)[0]).sin().sum(-1) + p[..., 0],
    "parts": lambda m, x: (p := m.map(x).split([1, 3, 4], -1))[0] * p[2],
    "unbind": lambda m, x: m.map(x).unflatten(-1, (4, 2)).unbind(-2)[1],
    "select": lambda m, x: m.map(x).select(-1, 3),
    "index": lambda m, x: m.map(x)[..., EVEN],
    "index select": lambda m, x: m.map(x).index_select(-1, EVEN),
    "window": lambda m, x: m.map(x).unfold(-1, 2, 3),
    "diagonal": lambda m, x: torch.diagonal(m.map(x).unflatten(-1, (2, 4)), 0, -2, -1),
    "joined": lambda m, x: torch.cat([m.map(x), m.map(x.sin()) * m.factor], -1)[..., 6:10],
    "stacked": lambda m, x: torch.stack([m.map(x), m.factor.expand(2, TOKENS, 8)])[0][..., :5],
    "a factor per channel": lambda m, x: (m.map(x) * m.factor)[..., 2:5],
    "a factor per token": lambda m, x: (m.map(x) * m.token)[:, 3:5, :2],
    "one number for all": lambda m, x: (m.map(x) * m.one)[..., :2],
    "transposed": lambda m, x: m.map(x).transpose(1, 2)[:, :2].tanh(),
    "weight transposed": lambda m, x: (x @ m.other)[..., 1:4],
    "two maps": lambda m, x: nn.functional.linear(m.map(x)[..., :6], m.weight)[..., :2],
    "a sum of two": lambda m, x: (m.map(x) + x @ m.other)[..., 5:],
    "masked": lambda m, x: m.map(x).masked_fill(torch.arange(8) > 5, 1.0)[..., :5],
    "where": lambda m, x: torch.where(torch.arange(TOKENS)[:, None] > 3, m.map(x), m.factor)[..., 1:4],
    "norm before the cut": lambda m, x: nn.functional.layer_norm(m.map(x), (8,))[..., :3],
    "softmax before the cut": lambda m, x: m.map(x).softmax(-1)[..., :3],
    "product before the cut": lambda m, x: ((h := m.map(x)) @ h.transpose(1, 2))[..., :3],
    "running sum before the cut": lambda m, x: m.map(x).cumsum(-1)[..., 7:],
    "prelu along another axis": lambda m, x: nn.functional.prelu(m.map(x).transpose(1, 2)[:, :8, :8], m.factor)[
        ..., :3
    ],
    "behind attention": lambda m, x: ((x @ x.transpose(1, 2)).softmax(-1) @ m.map(x))[..., :3],
    "one matrix for all": lambda m, x: torch.matmul(x.sin() @ m.weight.mT, m.other.mT)[..., 1:3],
    "a vector on the right": lambda m, x: torch.matmul(m.map(x), m.factor)[:, 2:4],
    "rows of a product": lambda m, x: (m.map(x).transpose(1, 2) @ x.tanh())[:, 5:],
    "repeated": lambda m, x: m.map(x)[..., :2].repeat_interleave(torch.tensor([1, 3]), -1),
    "an empty part": lambda m, x: torch.cat([m.map(x)[..., :0], m.map(x.sin())[..., :2]], -1),
}


@pytest.mark.parametrize("forward", EXACT.values(), ids=list(EXACT))
def test_what_is_read_has_a_gradient_and_nothing_else_has(forward: Callable) -> None:
    for name, (read, moves) in masks_and_gradients(forward).items():
        assert torch.equal(read, moves), name


LARGER = {  # what another input would read counts as read; so does what is cut from a parameter itself
    "cut to the tokens": lambda m, x: nn.functional.linear(x, torch.cat([m.weight, m.weight.sin()]))[..., :TOKENS],
    "cut to one token more": lambda m, x: torch.cat([m.map(x), m.map(x.sin())], -1)[..., : TOKENS + 1],
    "nothing of it, for this input": lambda m, x: x.sum(-1) + m.map(x)[..., :0].sum(-1),
    "what the input chooses": lambda m, x: m.map(x).index_select(-1, x[0, 0, :3].argsort()),
    "a table of positions": lambda m, x: x + m.other[:1, :WIDTH].repeat(TOKENS, 1),
}


@pytest.mark.parametrize("forward", LARGER.values(), ids=list(LARGER))
def test_what_another_input_may_read_counts_as_read(forward: Callable) -> None:
    for read, moves in masks_and_gradients(forward).values():
        assert bool(read.all())
        assert bool((read | ~moves).all())


def test_an_image_may_grow_in_rows_and_columns_but_not_in_channels() -> None:
    def run(m: Parts, x: Tensor, kept: int) -> Tensor:
        places = nn.functional.linear(x.flatten(2)[:, :, :WIDTH], m.weight)
        return places[..., :kept]

    image = torch.randn(2, 3, 5, 7, generator=GENERATOR, dtype=torch.float64)
    for kept, whole in ((5, True), (7, True), (6, True), (3, False), (2, False)):
        read, _ = masks_and_gradients(lambda m, x, n=kept: run(m, x, n), image)["weight"]
        assert bool(read.all()) == whole, kept


def test_a_large_value_counts_as_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST", 2 * TOKENS * 8 - 1)
    read, moves = masks_and_gradients(EXACT["slice"])["weight"]
    assert bool(read.all()) and not bool(moves.all())
