"""Vectors that a norm reads one by one have a scale each: rows of a table, heads of a projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.search.line_scales import LineScaleClaim
from deadweight.source.randomise import randomise

D, HEADS, WORDS, WIDTH = 8, 2, 11, 3
TOKENS = torch.randint(0, WORDS, (2, 4), generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """A table that is looked up and normed, and an untied readout; `how` says what stands between or beside."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.words, self.how = nn.Embedding(WORDS, WIDTH), how
        read = 2 * WIDTH if how == "pairs" else WIDTH
        self.norm, self.out = nn.RMSNorm(read, eps=0.0), nn.Linear(read, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * 3.0
        if self.how == "pairs":
            x = x.reshape(2, 2, 2 * WIDTH)
        if self.how == "rounded":
            x = torch.div(x, 0.5, rounding_mode="floor")
        y = torch.tanh(self.out(self.norm(x)))
        return y + x.sum(-1, keepdim=True) if self.how == "skip" else y


class Heads(nn.Module):
    """Queries and keys normed head by head, with ε = 0; `how` says what else reads the queries."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norms, self.how = nn.ModuleList(nn.RMSNorm(D // HEADS, eps=0.0) for _ in range(2)), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.norms[0](q) @ self.norms[1](k).transpose(-1, -2)
        if self.how == "first head":
            scores = scores + q[:, :1].sum(-1, keepdim=True).transpose(-1, -2)
        if self.how == "whole":
            scores = nn.functional.rms_norm(self.q(x), (D,), eps=0.0)[:, None, :, :4] @ k.transpose(-1, -2)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def claims_of(module: nn.Module, inputs: Tensor) -> tuple[dict[str, LineScaleClaim], Point, nn.Module]:
    clone = randomise(module, 0)
    given = inputs.double() if inputs.is_floating_point() else inputs
    graph = canonical(trace(clone, (given,), {}))
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: given})
    found = [c for c in search(graph).claims if isinstance(c, LineScaleClaim)]
    return {graph.parameters[c.node]: c for c in found}, point, clone


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (Normed(), TOKENS, {"words.weight": WORDS}),
        (Heads(), VECTORS, {"q.weight": HEADS, "k.weight": HEADS}),
    ],
)
def test_each_vector_that_a_norm_reads_has_a_scale(module: nn.Module, inputs: Tensor, expected: dict[str, int]) -> None:
    claims, point, clone = claims_of(module, inputs)
    assert {name: c.dof for name, c in claims.items()} == expected
    for claim in claims.values():
        after = randomise(module, 0)
        with torch.no_grad():
            for node, value in claim.member(point, torch.Generator().manual_seed(3)).items():
                after.get_parameter(point.graph.parameters[node]).copy_(value)
        given = inputs.double() if inputs.is_floating_point() else inputs
        assert float((clone(given) - after(given)).abs().max()) < 1e-12  # rounding of a few operations


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (Normed("skip"), TOKENS, {}),
        (Normed("pairs"), TOKENS, {}),  # the norm reads two rows at once
        (Normed("rounded"), TOKENS, {}),
        (Heads("whole"), VECTORS, {}),
        (
            Heads("first head"),
            VECTORS,
            {"k.weight": HEADS},
        ),  # one head of the queries is left: its scale is DW014's own
    ],
)
def test_vectors_that_anything_else_reads_have_none(module: nn.Module, inputs: Tensor, expected: dict) -> None:
    claims, _, _ = claims_of(module, inputs)
    assert {name: c.dof for name, c in claims.items()} == expected


@pytest.mark.parametrize(("module", "inputs"), [(Normed(), TOKENS), (Heads(), VECTORS)])
def test_nothing_is_left_unexplained(module: nn.Module, inputs: Tensor) -> None:
    torch.manual_seed(0)
    found = deadweight.audit(module, inputs, complete=True).completeness
    assert found is not None and not found.unsound
    assert found.measured == found.explained
