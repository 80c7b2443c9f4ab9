"""The evidence contradicts a false claim even where the model returns NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.account import make_account
from deadweight.audit.checker import contradicts, replay_motions
from deadweight.audit.evidence import gradients, relative
from deadweight.claims.claim import Title
from deadweight.claims.point import Point
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.proof.steps import Step

WIDTH = 3


class Root(nn.Module):
    """√(x²w² + b + 1/1000): a bias that moves far takes numbers out of the root's domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.square() * self.weight.square() + 1e-3 + self.bias)


def graph_of(module: nn.Module) -> tuple[Graph, dict[str, Tensor], Callable[[int], dict[str, Tensor]]]:
    graph = canonical(trace(module.double(), (torch.randn(2, WIDTH, dtype=torch.float64),)))
    values = {n: t.detach() for n, t in graph.tensors.items()}

    def draw(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {graph.inputs[0]: torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)}

    return graph, values, draw


def dead(graph: Graph, parameter: str) -> ShiftClaim:
    """What a careless prover might say."""
    groups = torch.arange(1, WIDTH + 1)
    step = Step(graph.node_of[parameter], "parameter", "by assertion", "nothing follows")
    return ShiftClaim(
        law=Title("DW000", "careless"),
        node=graph.node_of[parameter],
        dof=WIDTH,
        verdict="dead",
        steps=(step,),
        groups=groups,
    )


def test_a_motion_that_gives_nan_counts_as_an_infinite_change() -> None:
    graph, values, draw = graph_of(Root())
    assert "by inf" in replay_motions({0: dead(graph, "bias")}, Point(graph, values, draw(1)))[0]


def test_a_false_claim_is_contradicted_where_gradients_are_nan() -> None:
    graph, values, draw = graph_of(Root())
    values[graph.node_of["bias"]] = torch.tensor([1.0, -100.0, -100.0], dtype=torch.float64)
    assert gradients(graph, values, draw).draws == ()
    assert "changes the outputs" in replay_motions({0: dead(graph, "bias")}, Point(graph, values, draw(1)))[0]


def test_a_motion_that_moves_nothing_proves_nothing() -> None:
    graph, values, draw = graph_of(Root())
    still = replace(dead(graph, "bias"), groups=torch.zeros(WIDTH, dtype=torch.int64))
    assert "moves nothing" in replay_motions({0: still}, Point(graph, values, draw(1)))[0]


def test_one_false_claim_among_true_ones_is_the_one_that_is_named() -> None:
    graph, values, draw = graph_of(Root())
    unread = replace(dead(graph, "bias"), groups=torch.zeros(WIDTH, dtype=torch.int64), dof=0)
    assert list(replay_motions({0: unread, 1: dead(graph, "weight"), 2: unread}, Point(graph, values, draw(1)))) == [1]


def test_a_motion_of_nan_is_no_evidence() -> None:
    g = {"p": torch.ones(2, dtype=torch.float64)}
    assert relative(g, 1.0, {"p": torch.tensor([math.nan, 0.0])}) == math.inf
    assert relative(g, 1.0, {"p": torch.tensor([1.0, -1.0])}) == 0.0


@pytest.mark.parametrize(("old", "new"), [(1.0, math.nan), (math.nan, 1.0), (-math.inf, 1.0), (1.0, math.inf)])
def test_a_replayed_step_that_gives_nan_is_refused(old: float, new: float) -> None:
    wide = lambda x: torch.tensor([2.0, x], dtype=torch.float64)  # noqa: E731
    assert contradicts(wide(new), wide(old), None) is not None
    assert contradicts(wide(old), wide(old), None) is None


def test_a_claim_whose_motion_is_nan_counts_as_unsound() -> None:
    class Broken(ShiftClaim):
        def motions(self, *_: object) -> object:
            yield {self.node: torch.full((WIDTH,), math.nan, dtype=torch.float64)}

    graph, values, draw = graph_of(Root())
    claim = Broken(**vars(dead(graph, "weight")))
    counted = make_account(graph, values, draw, [claim])
    assert counted.completeness.unsound == 1 and counted.completeness.explained == 0


class Nowhere(nn.Module):
    """NaN, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(-1 - self.read(x).square())


def test_nan_gradients_are_reported_as_missing() -> None:
    result = deadweight.audit(Nowhere(), torch.randn(2, WIDTH))
    assert any("not finite" in note for note in result.notes)
    assert "not finite" in str(deadweight.audit(Nowhere(), torch.randn(2, WIDTH), complete=True).uncounted)


def test_a_parameter_that_only_a_complex_output_reads_is_not_unexplained() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.turned = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.real(x)), torch.view_as_complex(torch.tanh(self.turned(x)))

    result = deadweight.audit(Complex(), torch.randn(4, WIDTH), complete=True)
    assert not result.unknown and result.completeness is not None and result.completeness.measured == 0


class Pooled(nn.Module):
    """Softmax over the positions: a bias per channel is dead."""

    def __init__(self, *, bend: bool = False) -> None:
        super().__init__()
        self.bias, self.bend = nn.Parameter(torch.randn(WIDTH)), bend

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x + self.bias) if self.bend else x + self.bias, 1)


def test_a_model_without_a_live_parameter_is_not_contradicted_by_rounding() -> None:
    result = deadweight.audit(Pooled(), torch.randn(2, 5, WIDTH))
    assert [(f.parameter, f.dof) for f in result.findings] == [("bias", WIDTH)] and not result.unknown
    assert not deadweight.audit(Pooled(bend=True), torch.randn(2, 5, WIDTH)).findings


class Gathered(nn.Module):
    """Softmax over three of four channels: the mean of their biases is dead, and the fourth is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.gather(x + self.bias, 2, torch.arange(3).expand(2, 3, 3)), 2)


def test_a_dead_mean_does_not_explain_a_dead_element() -> None:
    result = deadweight.audit(Gathered(), torch.randn(2, 3, 4))
    assert [f.dof for f in result.findings if f.verdict == "dead"] == [1]
    assert any(u.parameter == "bias" and "1 of 4 elements" in u.why for u in result.unknown)


def test_what_no_rule_explains_is_listed_even_where_nothing_is_live() -> None:
    class Summed(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax((x + self.bias).cumsum(0), 1)

    result = deadweight.audit(Summed(), torch.randn(2, 5, WIDTH))
    assert not result.findings and any(u.parameter == "bias" and "3 of 3" in u.why for u in result.unknown)


class Faint(nn.Module):
    """w₂ counts so little that rounding decides whether it counts at all."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.w, self.share = nn.Parameter(torch.ones(3)), share

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :1] * self.w[0]) + self.share * torch.sin(x[:, 1:2] * self.w[1])


@pytest.mark.parametrize(("share", "decided"), [(1.0, True), (1e-9, True), (1.5e-13, False)])
@pytest.mark.parametrize("seed", range(4))
def test_a_count_without_a_gap_is_called_undecided(share: float, decided: bool, seed: int) -> None:
    inputs = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    result = deadweight.audit(Faint(share).double(), inputs, complete=True)
    assert any("undecided" in u.why for u in result.unknown) is not decided


def test_an_account_of_too_many_parameters_is_refused_in_words_and_the_findings_stay() -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 100)).double()
    inputs = torch.randn(2, 100, dtype=torch.float64)
    result = deadweight.audit(model, inputs, complete=True)
    assert result.completeness is None
    assert result.uncounted is not None
    assert "has 40,300 parameters; expected at most 20,000: build the model smaller" in result.uncounted
    assert result.findings == deadweight.audit(model, inputs).findings != ()
    assert deadweight.audit(model, inputs).uncounted is None, "nobody asked for it"
