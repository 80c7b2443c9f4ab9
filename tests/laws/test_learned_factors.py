"""A learned factor folds into whatever writes what it multiplies; two factors or weights of one value are one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deadweight
from deadweight.claims.claim import Claim
from deadweight.claims.parallel_claim import ParallelClaim
from deadweight.search.learned_factor import LearnedFactorClaim
from deadweight.search.same_value import SameValueClaim
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

X = torch.linspace(-2, 2, 48, dtype=torch.float64).sin().reshape(2, 4, 6)


class Attention(nn.Module):
    """Two heads of three dimensions; `place` says where the factor of each head stands."""

    def __init__(self, place: str, *, fused: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.place, self.fused = place, fused
        self.qkv = nn.Linear(6, 18, bias=bias) if fused else None
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=bias) for _ in range(3))
        self.factor = nn.Parameter(torch.tensor([0.7, 1.4]))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.qkv is not None else (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.unflatten(-1, (2, 3)).transpose(1, 2) for p in parts)
        factor = self.factor.view(-1, 1, 1)
        q = F.normalize(q, dim=-1) if self.place == "normed queries" else q
        q = torch.tanh(q) if self.place == "squashed queries" else q
        raw = q
        q = q * (1 + factor) if self.place == "1 + factor" else q
        q = q * factor.exp() if self.place == "logarithm" else q
        q = q * factor if "queries" in self.place else q
        scores = q @ k.transpose(-1, -2)
        scores = scores * factor if self.place == "scores" else scores
        scores = scores + factor if self.place == "added" else scores
        y = scores.softmax(-1) @ v
        y = y * factor if self.place == "values" else y
        return torch.tanh(y) + (raw.sum(-1, keepdim=True) if "returned" in self.place else 0)


HOLDS = ["queries", "scores", "1 + factor", "logarithm", "values"]
FAILS = ["normed queries", "squashed queries", "added", "queries, which are returned"]


def factors(claims: list[Claim]) -> list[LearnedFactorClaim]:
    return [c for c in claims if isinstance(c, LearnedFactorClaim)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", HOLDS)
def test_the_factor_of_each_head_folds_into_its_rows(place: str, fused: bool, true_claims: Callable[..., Any]) -> None:
    """Queries and keys can both take a factor of the scores: one dimension for each head."""
    graph, claims = true_claims(Attention(place, fused=fused), X)
    claim = next(iter(factors(claims)))
    assert graph.parameters[claim.node] == "factor" and claim.dof == 2
    weight = "qkv.weight" if fused else "v.weight" if place == "values" else "q.weight"
    assert weight in {graph.parameters[n] for n in claim.into}
    scaled = dict(claim.scaled)[graph.node_of[weight]][:, 0]
    start = (12 if place == "values" else 0) if fused else 0
    assert scaled[start : start + 6].tolist() == [1, 1, 1, 2, 2, 2]
    assert int((scaled > 0).sum()) == 6


@pytest.mark.parametrize("place", FAILS)
def test_a_factor_behind_what_is_not_linear_or_is_read_elsewhere_stays(
    place: str, true_claims: Callable[..., Any]
) -> None:
    assert not factors(true_claims(Attention(place), X)[1])


@pytest.mark.parametrize("place", ["scores", "logarithm"])
def test_the_laws_count_every_dimension_of_scaled_heads(place: str) -> None:
    torch.manual_seed(0)
    found = deadweight.audit(Attention(place), (X.float(),), complete=True)
    account = found.completeness
    assert account is not None and not account.unsound and account.measured == account.explained
    assert sum(f.dof for f in found.findings if f.parameter == "factor") == 2


class Shared(nn.Module):
    """A projection whose result is scaled, and read without the factor too if `twice`."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.map, self.factor, self.twice = nn.Linear(6, 5), nn.Parameter(torch.tensor(1.3)), twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        return torch.tanh(self.factor * y) + (torch.sin(y) if self.twice else 0)


def test_a_value_that_is_read_without_the_factor_too_keeps_it(true_claims: Callable[..., Any]) -> None:
    assert [c.dof for c in factors(true_claims(Shared(twice=False), X)[1])] == [1]
    assert not factors(true_claims(Shared(twice=True), X)[1])


class Halves(nn.Module):
    """One half of a map's outputs is scaled, by a factor of each number; the other is read as it is."""

    def __init__(self, *, overlap: bool) -> None:
        super().__init__()
        self.map, self.factor, self.overlap = nn.Linear(6, 8), nn.Parameter(torch.rand(4) + 0.5), overlap

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        other = y[..., 3:] if self.overlap else y[..., 4:]
        return torch.tanh(torch.cat([self.factor * y[..., :4].neg(), other], -1))


def test_rows_that_nothing_else_reads_take_the_factor_over(true_claims: Callable[..., Any]) -> None:
    graph, claims = true_claims(Halves(overlap=False), X)
    (claim,) = factors(claims)
    labels = dict(claim.scaled)[graph.node_of["map.bias"]].tolist()
    assert claim.dof == 4 and labels == [1, 2, 3, 4, 0, 0, 0, 0]
    assert not factors(true_claims(Halves(overlap=True), X)[1])


class Twice(nn.Module):
    """a·x + b·x, or A·x + B·x, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b = (nn.Parameter(torch.rand(1) + 0.5) for _ in range(2))
        self.left, self.right = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "maps":
            return torch.tanh(self.left(x) + self.right(x))
        if self.way == "maps, subtracted":
            return torch.tanh(torch.sub(self.left(x), self.right(x), alpha=2))
        if self.way == "maps of two values":
            return torch.tanh(self.left(x) + self.right(x.roll(1, 1)))
        if self.way == "a map read twice":
            y = self.left(x)
            return torch.tanh(y + self.right(x)) + y.sin()
        second = self.a if self.way == "one factor twice" else self.b[0]
        return torch.tanh(self.left(torch.tanh(self.a[0] * x + second * x)))


@pytest.mark.parametrize(("way", "dimensions"), [("factors", 1), ("maps", 30), ("maps, subtracted", 30)])
def test_of_two_parameters_that_act_on_one_value_only_the_sum_counts(
    way: str, dimensions: int, true_claims: Callable[..., Any]
) -> None:
    kind = SameValueClaim if way == "factors" else ParallelClaim
    assert [c.dof for c in true_claims(Twice(way), X)[1] if isinstance(c, kind)] == [dimensions]


@pytest.mark.parametrize("way", ["maps of two values", "a map read twice", "one factor twice"])
def test_parameters_of_different_values_or_other_readers_both_count(way: str, true_claims: Callable[..., Any]) -> None:
    assert not [c for c in true_claims(Twice(way), X)[1] if isinstance(c, (SameValueClaim, ParallelClaim))]


LLAMA = {"norm": "rms", "norm_eps": 0.0, "positions": "rotary", "activation": "swiglu", "tie_word_embeddings": False}
SMALL = {"vocab_size": 11, "context": 5, "d_model": 8, "n_layers": 2, "heads": 2, "hidden": 12}


def test_our_transformer_with_a_learned_scale_is_explained_to_the_last_dimension() -> None:
    """173 of LLaMA, and one for each of four heads."""
    model = TransformerForCausalLM(TransformerConfig(**SMALL | LLAMA | {"learned_scale": True}))
    account = deadweight.audit(model, (torch.tensor([[0, 10, 3, 7, 5]]),), complete=True).completeness
    assert account is not None and (account.measured, account.explained, account.unsound) == (177, 177, 0)
