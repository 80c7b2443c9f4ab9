"""No gradient: by construction, where a parameter only chooses; and of models that have no graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit import untraced_evidence
from deadweight.audit.choice_parameters import has_no_derivative
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.source.model import open_model


class Chosen(nn.Module):
    """The best of four rows by a score; `weighed` says whether the score counts beyond the choice."""

    def __init__(self, *, weighed: bool) -> None:
        super().__init__()
        self.score, self.bias = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))
        self.rows, self.weighed = nn.Embedding(4, 3), weighed

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.score(x))
        _, best = torch.topk(scores + self.bias, 1)
        taken = self.rows(best.squeeze(-1))
        return taken * scores.gather(-1, best) if self.weighed else taken


class Detached(nn.Module):
    """A factor that is computed with, and that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.factor = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.read(x)) * self.factor.detach()


def without_derivative(module: nn.Module) -> set[str]:
    graph = canonical(trace(module, (torch.randn(2, 5, 4),), {}))
    return {parameter for node, parameter in graph.parameters.items() if has_no_derivative(graph, node)}


def without_gradient(module: nn.Module) -> set[str]:
    """The same, by autograd."""
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(module(torch.randn(2, 5, 4)).sum(), list(named.values()), allow_unused=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is None}


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (Chosen(weighed=False), {"score.weight", "bias"}),
        (Chosen(weighed=True), {"bias"}),
        (nn.Linear(4, 3), set()),
    ],
    ids=["chosen", "weighed", "linear"],
)
def test_parameters_without_a_derivative_are_those_that_autograd_reports(
    module: nn.Module, parameters: set[str]
) -> None:
    assert without_derivative(module) == without_gradient(module) == parameters


def test_the_function_depends_on_what_is_detached() -> None:
    assert without_gradient(Detached()) == {"factor"}
    assert without_derivative(Detached()) == set()


@pytest.mark.parametrize(("module", "counted"), [(Chosen(weighed=True), 28), (Detached(), 18)])
def test_the_account_leaves_out_what_no_derivative_reaches(module: nn.Module, counted: int) -> None:
    completeness = deadweight.audit(module, (torch.randn(2, 5, 4),), complete=True).completeness
    assert completeness is not None
    assert completeness.parameters == counted


def test_a_choice_matters_although_it_has_no_gradient() -> None:
    module, x = Chosen(weighed=False), torch.randn(2, 5, 4)
    before = module(x)
    assert all(p.grad is None or not p.grad.any() for p in (module.bias, module.score.weight))
    with torch.no_grad():
        module.bias[2] = 9.0
    assert not torch.equal(before, module(x))


class Single(nn.Module):
    """Its own code says float32."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x.to(torch.float32))


def test_a_clone_that_runs_in_float32_alone_gives_evidence_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(open_model(Single(), inputs=torch.randn(2, 3)), config=object())
    monkeypatch.setattr(untraced_evidence, "narrow", replace)  # the clone is a copy of the model
    assert [u.parameter for u in untraced_evidence.untraced_evidence(source)] == ["unread"]
    monkeypatch.setattr(untraced_evidence, "own_precision", lambda _: torch.float64)
    with pytest.raises(DeadweightError, match="does not run"):
        list(untraced_evidence.untraced_evidence(source))
