"""Masks: what a mask keeps is not what it hides, and a query that sees no key gets no average."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

WIDTH, LENGTH = 6, 5
X = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.rand(4, LENGTH, 1, generator=torch.Generator().manual_seed(1)) > 0.5


def kept(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


def hidden(mask: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(mask, 0.0)


def shown(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, 0.0, x)


class BesideLayerNorm(nn.Module):
    """The mean that LayerNorm ignores is also read behind masks."""

    def __init__(self, first: Callable, second: Callable) -> None:
        super().__init__()
        self.write, self.norm, self.read = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.first, self.second = first, second

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.write(x)
        return self.read(torch.tanh(self.norm(y))), self.first(mask, y) - self.second(mask, y)


@pytest.mark.parametrize(("first", "second"), [(kept, hidden), (hidden, kept), (kept, shown), (shown, kept)])
def test_a_shift_that_a_mask_keeps_does_not_cancel_one_that_it_hides(
    true_claims: Callable, first: Callable, second: Callable
) -> None:
    _, claims = true_claims(BesideLayerNorm(first, second), X, MASK)
    assert "DW005" not in {claim.code for claim in claims}


@pytest.mark.parametrize("pair", [(kept, kept), (hidden, hidden), (hidden, shown)])
def test_a_shift_that_two_masks_treat_alike_cancels(true_claims: Callable, pair: tuple[Callable, Callable]) -> None:
    _, claims = true_claims(BesideLayerNorm(*pair), X, MASK)
    assert "DW005" in {claim.code for claim in claims}


class MaskedHalves(nn.Module):
    def __init__(self, first: Callable, second: Callable) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 8) for _ in range(3))
        self.o, self.first, self.second = nn.Linear(8, 9), first, second

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)
        return self.o(torch.cat([self.first(mask, y[..., :4]), self.second(mask, y[..., 4:])], -1))


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [(kept, hidden, 2 * 16), (shown, kept, 2 * 16), (kept, kept, 64), (hidden, shown, 64)],
)
def test_values_behind_a_mask_do_not_mix_with_those_behind_its_opposite(
    true_claims: Callable, first: Callable, second: Callable, size: int
) -> None:
    _, claims = true_claims(MaskedHalves(first, second), X, MASK)
    assert sum(claim.dof for claim in claims if claim.code == "DW010") == size


class Attention(nn.Module):
    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, 3)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask))


def visible(*, all_see: bool, additive: bool) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[2] &= all_see
    return torch.where(mask, 0.0, -math.inf).double() if additive else mask


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("all_see", [False, True])
def test_a_value_bias_folds_only_if_every_query_sees_a_key(additive: bool, constant: bool, all_see: bool) -> None:
    mask = visible(all_see=all_see, additive=additive)
    module = Attention(mask if constant else None).double()
    given = (X,) if constant else (X, mask)
    if constant or not additive:  # a mask of floats that is an input is drawn anew, finite everywhere
        codes = {finding.code for finding in deadweight.audit(module, given).findings}
        assert ("DW003" in codes) is all_see
        assert {"DW002", "DW009", "DW010"} <= codes


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("all_see", [False, True])
def test_the_search_itself_sees_a_constant_mask_that_hides_a_line(
    true_claims: Callable, additive: bool, all_see: bool
) -> None:
    _, claims = true_claims(Attention(visible(all_see=all_see, additive=additive)), X)
    assert ("DW003" in {claim.code for claim in claims}) is all_see


class Scored(Attention):
    """The same with a function of queries and keys in place of attention's own weights."""

    def __init__(self, weights: Callable) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.o(self.weights(self.q(x), self.k(x)) @ self.v(x))


def uniform_where_hidden(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~visible(all_see=False, additive=False), -1e30).softmax(-1)


def fixed_keys(q: Tensor, _: Tensor) -> Tensor:
    keys = torch.linspace(-1.0, 1.0, WIDTH * LENGTH, dtype=q.dtype).reshape(WIDTH, LENGTH)
    return torch.ops.aten._safe_softmax(q @ keys, -1)


@pytest.mark.parametrize("weights", [uniform_where_hidden, fixed_keys])
def test_lines_that_do_not_become_zeros_sum_to_one(true_claims: Callable, weights: Callable) -> None:
    _, claims = true_claims(Scored(weights), X)
    assert "DW003" in {claim.code for claim in claims}


def test_a_bias_of_all_scores_hides_nothing(true_claims: Callable) -> None:
    _, claims = true_claims(Attention(torch.full((LENGTH, LENGTH), -1.0).double()), X)
    assert "DW003" in {claim.code for claim in claims}


def test_what_attention_answers_a_query_that_sees_no_key_is_traced() -> None:
    module, mask = Attention().double(), visible(all_see=False, additive=True)
    graph = canonical(trace(module, (X, mask)))
    (out,) = evaluate(graph, graph.tensors, bind(graph, (X, mask), {}))
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, module(X, mask))


class Overwritten(nn.Module):
    """A mask that is filled with whole numbers: each that is not zero counts as true."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        mask = torch.zeros(numbers.shape, dtype=torch.bool)
        mask.copy_(numbers)
        return self.read(self.write(x).masked_fill(mask, 0.0))


def test_a_copy_into_a_mask_is_a_cast(true_claims: Callable) -> None:
    graph, _ = true_claims(Overwritten(), X, 2 * MASK.to(torch.int64))
    assert [node.dtype for node in graph.nodes.values() if node.op == "aten.copy"] == [torch.bool]


class SlopeFromTable(nn.Module):
    """The slope of a PReLU is looked up: it turns with the table, and PReLU is not linear in it and its input."""

    def __init__(self, *, looked_up: bool) -> None:
        super().__init__()
        self.table, self.write, self.read = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.looked_up = looked_up

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        slope = self.table(tokens).mean((0, 1)) if self.looked_up else torch.full((WIDTH,), 0.1, dtype=x.dtype)
        return self.read(F.prelu(self.write(x).mT.contiguous(), slope).mT)


@pytest.mark.parametrize("looked_up", [False, True])
def test_a_slope_that_turns_ends_the_proof(true_claims: Callable, looked_up: bool) -> None:
    _, claims = true_claims(SlopeFromTable(looked_up=looked_up), X, torch.randint(0, 7, (4, LENGTH)))
    moved: set[Any] = {node for claim in claims if claim.verdict == "gauge" for node in (claim.node, *claim.into)}
    assert not any("table" in node for node in moved)
    assert sum(claim.dof for claim in claims if claim.code == "DW011") == WIDTH


class Bins(nn.Module):
    """Whole parts of real numbers pick rows: numbers that are drawn may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table((3 * x).long()))


def test_inputs_that_cannot_be_drawn_end_in_a_note() -> None:
    result = deadweight.audit(Bins(), (torch.rand(4, 5),))
    assert result.untested is not None and "out of range" in result.untested


class Refilled(nn.Module):
    """Scores of −10³⁰ at hidden keys, to which something is added."""

    def __init__(self, added: Callable, low: float) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.added, self.low = added, low

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).mT).masked_fill(mask.mT, self.low)
        return torch.softmax(self.added(scores, mask.mT), -1) @ torch.tanh(x)


LIFTS: dict[str, Callable] = {
    "plus a large mask": lambda scores, mask: scores + 1e30 * mask,
    "minus a low mask": lambda scores, mask: scores - -1e30 * mask,
    "plus the opposite of a low mask": lambda scores, mask: scores + -(mask * -1e30),
    "plus half of it, twice": lambda scores, mask: (scores + 5e29 * mask).unsqueeze(0).squeeze(0) + 5e29 * mask,
    "plus a large constant": lambda scores, mask: scores + torch.full((LENGTH, LENGTH), 1e30).triu(3),
    "two of it": lambda scores, mask: torch.add(scores, mask * 5e29, alpha=2),
}
LEAVES: dict[str, Callable] = {
    "plus nothing": lambda scores, mask: scores + 0.0 * mask,
    "plus a number": lambda scores, mask: scores + 1.0,
    "plus an ordinary mask": lambda scores, mask: scores + 2.0 * mask,
    "times a large number": lambda scores, mask: scores * 1e30,
    "plus none of a large mask": lambda scores, mask: torch.add(scores, mask * 1e30, alpha=0),
    "plus a low mask": lambda scores, mask: scores + (1.0 - mask.double()) * -1e30,
    "minus a large mask": lambda scores, mask: scores - 1e30 * mask,
}


@pytest.mark.parametrize("added", LIFTS.values(), ids=list(LIFTS))
def test_a_low_score_that_is_lifted_again_is_not_hidden(true_claims: Callable, added: Callable) -> None:
    _, claims = true_claims(Refilled(added, -1e30), X, MASK)
    assert "DW002" not in {claim.code for claim in claims}


@pytest.mark.parametrize("low", [-1e30, -math.inf])
@pytest.mark.parametrize("added", LEAVES.values(), ids=list(LEAVES))
def test_a_score_that_stays_low_is_hidden(true_claims: Callable, added: Callable, low: float) -> None:
    _, claims = true_claims(Refilled(added, low), X, MASK)
    assert "DW002" in {claim.code for claim in claims}


SLIGHT: dict[str, Callable] = {
    "plus the mask": lambda scores, mask: scores + 1e4 * mask,
    "plus half of it, twice": lambda scores, mask: (scores + 5e3 * mask) + 5e3 * mask,
    "over a temperature": lambda scores, mask: scores / 100,
    "through a bound": lambda scores, mask: scores.clamp(min=-5),
}


@pytest.mark.parametrize("added", SLIGHT.values(), ids=list(SLIGHT))
def test_a_finite_fill_that_does_not_stay_low_is_not_hidden(true_claims: Callable, added: Callable) -> None:
    _, claims = true_claims(Refilled(added, -1e4), X, MASK)
    assert "DW002" not in {claim.code for claim in claims}


def test_a_finite_fill_that_stays_low_is_hidden_and_the_note_says_so(true_claims: Callable) -> None:
    _, claims = true_claims(Refilled(lambda scores, mask: scores + 1.0, -1e4), X, MASK)
    (claim,) = [claim for claim in claims if claim.code == "DW002"]
    assert "-10000 counts as −∞" in claim.note
