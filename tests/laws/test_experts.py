"""Experts kept as one parameter of three axes: every expert has its own hidden units, and all of them read the norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

WIDTH, HIDDEN, EXPERTS = 3, 2, 3


class Mixture(nn.Module):
    """Two experts of three for every token; `change` may spoil the hidden units, or the index of who reads them."""

    def __init__(self, change: Callable[..., Any] | None = None, scores: str = "softmax") -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.change, self.scores = change, scores

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        logits = self.router(rows)
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        weights, index = scores.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.scores == "softmax" else weights
        every, chosen = rows.repeat_interleave(2, 0), index.reshape(-1)
        gate, up = torch.matmul(self.gate_up[chosen], every.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        hidden, second = nn.functional.silu(gate) * up, chosen
        if self.change is not None:
            hidden, second = self.change(hidden, chosen)
        out = torch.matmul(self.down[second], hidden.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
        return out.reshape(len(rows), 2, WIDTH).sum(1).reshape(x.shape)


class Every(nn.Module):
    """All experts for every token, along the first axis, with stored matrices the other way round."""

    def __init__(self, turn: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x.flatten(0, 1).expand(EXPERTS, -1, -1), self.gate_up).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        return torch.bmm(hidden.flip(0) if self.turn else hidden, self.down).sum(0).reshape(x.shape)


class Normed(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixture, self.out = nn.RMSNorm(WIDTH), mixture, nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.sin(x + self.mixture(self.norm(x)))))


X = torch.randn(2, 4, WIDTH)


def claims(module: nn.Module) -> dict[str, int]:
    found = Counter[str]()
    for claim in search(canonical(trace(module.eval(), (X,)))).claims:
        found[claim.code] += claim.dof
    return dict(found)


def test_every_hidden_unit_of_every_expert_has_a_scale_and_the_account_closes() -> None:
    result = deadweight.audit(Normed(Mixture()), X, complete=True)
    assert result.completeness is not None
    assert result.completeness.measured == result.completeness.explained
    found = {(f.code, f.parameter): f.dof for f in result.findings}
    assert found["DW011", "mixture.gate_up"] == EXPERTS * HIDDEN
    assert found["DW006", "norm.weight"] == WIDTH
    assert found["DW018", "mixture.router.weight"] == WIDTH
    assert not any(u.why.startswith("DW") for u in result.unknown)


def test_all_experts_at_once_are_explained_too() -> None:
    result = deadweight.audit(Normed(Every()), X, complete=True)
    assert result.completeness is not None
    assert result.completeness.measured == result.completeness.explained == EXPERTS * HIDDEN + WIDTH


def test_sigmoid_scores_keep_the_router_alive() -> None:
    assert "DW018" not in claims(Normed(Mixture(scores="sigmoid")))


SPOILT: dict[str, Any] = {
    "the rows are turned round": lambda hidden, chosen: (hidden.flip(0), chosen),
    "another index reads": lambda hidden, chosen: (hidden, chosen.flip(0)),
    "rows of two experts are mixed": lambda hidden, chosen: (hidden + hidden.roll(1, 0), chosen),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=list(SPOILT))
def test_units_that_meet_another_expert_have_only_a_scale_that_all_experts_share(change: Any) -> None:
    assert claims(Normed(Mixture(change)))["DW011"] == HIDDEN


class Biased(Mixture):
    """A bias for the hidden units of every expert; `add` says how the rows get it."""

    def __init__(self, add: Callable[..., Tensor]) -> None:
        super().__init__(lambda hidden, chosen: (add(self, hidden, chosen), chosen))
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.common = nn.Linear(HIDDEN, HIDDEN, bias=False)


BIASES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "of the expert": (lambda m, hidden, chosen: hidden + m.bias[chosen], EXPERTS * HIDDEN),
    "of another expert": (lambda m, hidden, chosen: hidden + m.bias[chosen.flip(0)], 0),
    "of the expert, computed": (lambda m, hidden, chosen: hidden + torch.tanh(m.bias)[chosen], 0),
    "of the expert, read elsewhere": (lambda m, hidden, chosen: hidden + m.bias[chosen] * 1.0 + m.bias.sum(), 0),
    "of the expert, which others read": (lambda m, hidden, chosen: (hidden + m.bias[chosen]) * m.bias.mean(), 0),
    "of the first expert": (lambda m, hidden, chosen: hidden + m.bias[0], 0),
    "a number that is no parameter": (lambda m, hidden, chosen: hidden + 1.0, 0),
}


@pytest.mark.parametrize(("add", "scales"), BIASES.values(), ids=list(BIASES))
def test_a_bias_of_the_hidden_units_is_scaled_along_if_the_same_expert_looks_it_up(
    add: Callable[..., Tensor], scales: int
) -> None:
    assert claims(Normed(Biased(add))).get("DW011", 0) == scales


def test_moving_a_bias_of_experts_along_changes_nothing() -> None:
    module = Normed(Biased(BIASES["of the expert"][0])).double().eval()
    graph = canonical(trace(module, (X.double(),)))
    (claim,) = (c for c in search(graph).claims if c.code == "DW011")
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X.double()})
    moved = claim.member(point, torch.Generator().manual_seed(0))
    assert graph.node_of["mixture.bias"] in moved
    (before,), (after,) = point.outputs, point.at(moved).outputs
    assert float((before - after).abs().max()) < 1e-12  # float64 rounds at about 1e-16


MIXED: dict[str, Callable[..., Tensor]] = {
    "a common matrix reads them": lambda m, hidden, chosen: m.common(hidden),
    "their mean over rows is added": lambda m, hidden, chosen: hidden + hidden.mean(0, keepdim=True),
    "rows are weighed": lambda m, hidden, chosen: torch.outer(chosen, chosen).to(hidden.dtype) @ hidden,
    "rows are cut and joined": lambda m, hidden, chosen: torch.cat([hidden[4:], hidden[:4]]),
}


@pytest.mark.parametrize("change", MIXED.values(), ids=list(MIXED))
def test_units_of_experts_that_are_mixed_have_only_a_scale_that_all_experts_share(change: Any) -> None:
    found = claims(Normed(Biased(change)))
    assert found.get("DW011", 0) + found.get("DW010", 0) == HIDDEN


def test_experts_that_meet_each_other_share_their_scales() -> None:
    assert claims(Normed(Every(turn=True)))["DW011"] == HIDDEN


def test_units_behind_a_non_linear_function_have_no_scale() -> None:
    assert "DW011" not in claims(Normed(Mixture(lambda hidden, chosen: (torch.tanh(hidden), chosen))))


def test_a_norm_that_one_more_reader_needs_whole_keeps_its_gain() -> None:
    class Read(Normed):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return torch.tanh(self.out(torch.sin(x + self.mixture(normed)))), torch.sin(normed)

    assert "DW006" not in claims(Read(Mixture()))


class Rectified(nn.Module):
    """ReLU experts, chosen by data, that look up a bias for their hidden units; `of` says whose bias."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).to(torch.int64) + (rows[:, 1] > 0).to(torch.int64)
        hidden = torch.matmul(self.up[chosen], rows.unsqueeze(-1)).squeeze(-1) + self.bias[self.of(chosen)]
        return torch.tanh(torch.matmul(self.down[chosen], torch.relu(hidden).unsqueeze(-1)).squeeze(-1))


WHOSE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "its own": (lambda chosen: chosen, EXPERTS * HIDDEN),
    "another expert's": (lambda chosen: chosen.flip(0), HIDDEN),  # one scale that all experts share
}


@pytest.mark.parametrize(("of", "scales"), WHOSE.values(), ids=list(WHOSE))
def test_the_scales_of_experts_that_look_up_a_bias_are_counted_once(
    examine: Callable, of: Callable[[Tensor], Tensor], scales: int
) -> None:
    assert examine(Rectified(of), torch.randn(2, 16, WIDTH)).dof("DW011") == scales


class Centred(nn.Module):
    """A norm before a mixture, or before experts that all run; behind it, a function that sees every number."""

    def __init__(self, norm: nn.Module, mixture: nn.Module, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.norm, self.mixture, self.between = norm, mixture, between

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + torch.tanh(self.mixture(self.between(self.norm(x)))))


ROUTER = EXPERTS - 1  # its rows, but for the motion of all alike, which softmax ignores
LOST: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "chosen experts": (lambda: Centred(nn.LayerNorm(WIDTH, bias=False), Mixture()), EXPERTS * 2 * HIDDEN + ROUTER),
    "all experts": (lambda: Centred(nn.LayerNorm(WIDTH, bias=False), Every()), EXPERTS * 2 * HIDDEN),
    "RMSNorm": (lambda: Centred(nn.RMSNorm(WIDTH), Mixture()), 0),
    "a norm with a shift": (lambda: Centred(nn.LayerNorm(WIDTH), Every()), 0),
    "something else is added": (lambda: Centred(nn.LayerNorm(WIDTH, bias=False), Every(), lambda x: x + 1.0), 0),
}


@pytest.mark.parametrize(("make", "rows"), LOST.values(), ids=list(LOST))
def test_every_row_of_every_expert_loses_the_direction_that_layernorm_removes(
    true_claims: Callable, make: Callable[[], nn.Module], rows: int
) -> None:
    _, found = true_claims(make().eval(), torch.randn(2, 16, WIDTH, dtype=torch.float64))
    assert sum(c.dof for c in found if c.code == "DW008") == rows


def test_the_account_of_experts_behind_layernorm_closes() -> None:
    result = deadweight.audit(LOST["all experts"][0](), torch.randn(2, 16, WIDTH), complete=True).completeness
    assert result is not None and result.measured == result.explained
