"""The coverage benchmark: what becomes of a type whose narrow clone takes too long, and how reasons are worded."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace


@pytest.fixture(scope="module")
def coverage(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("coverage")


def endless_if(coverage: ModuleType, *slow: bool) -> Callable[..., dict[str, Any]]:
    def attempt(kind: str, model_type: str, *, as_narrow: bool) -> dict[str, Any]:
        if as_narrow in slow:
            raise coverage.Expired("more than 1 s")
        return {"status": "proofs", "reason": "", "form": "shallow"}

    return attempt


def test_a_narrow_clone_that_takes_too_long_gives_way_to_the_model_at_its_own_width(
    coverage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "attempt", endless_if(coverage, True))
    result = coverage.timed("base", "toy", 1, True)
    assert (result.status, result.form) == ("proofs", "shallow, at its own width")
    assert coverage.timed("base", "toy", 1, False).form == "shallow"
    monkeypatch.setattr(coverage, "attempt", endless_if(coverage, True, False))
    assert coverage.timed("base", "toy", 1, True).status == "timeout"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("no narrow clone of /tmp/x1/config.json runs", "cannot be built: no narrow clone of its config runs"),
        ("ImportError: A requires the timm library", "its code needs the timm library, which is not installed here"),
        (
            "forward() missing 2 required positional arguments: 'action_embeds' and 'state'; expected",
            "its forward requires 'action_embeds' and 'state', of which no example is known",
        ),
        (
            "forward() missing 3 required positional arguments: 'ids', 'mask', and 'classe…",
            "its forward requires 'ids', 'mask' and more, of which no example is known",
        ),
    ],
)
def test_a_reason_is_in_words_and_names_no_folder(coverage: ModuleType, why: str, words: str) -> None:
    assert coverage.in_words(why) == words


class StartsAtZero(nn.Module):
    """A decoder that starts at zeros, and one whose start is zero by accident: two parameters cancel."""

    def __init__(self, cancelled: bool) -> None:
        super().__init__()
        self.cancelled, self.project = cancelled, nn.Linear(4, 4)
        self.plus, self.minus = nn.Parameter(torch.ones(4)), nn.Parameter(-(torch.ones(4) ** 2))

    def forward(self, x: Tensor) -> Tensor:
        start = (
            x * self.minus.exp() * (self.plus + self.minus * self.plus**2) if self.cancelled else torch.zeros_like(x)
        )
        return x + self.project(start)


@pytest.mark.parametrize(("cancelled", "told"), [(False, True), (True, False)])
def test_a_weight_that_multiplies_zeros_is_told_from_one_that_does_so_at_one_point(
    benchmark: Callable[[str], ModuleType], cancelled: bool, told: bool
) -> None:
    evidence = benchmark("coverage_evidence")
    module, x = StartsAtZero(cancelled).double(), torch.randn(3, 4, dtype=torch.float64)
    graph = canonical(trace(module, (x,), {}))
    here = Point(graph, dict(graph.tensors), {graph.inputs[0]: x})
    points = [here, Point(graph, evidence.moved_parameters(graph, dict(graph.tensors)), here.inputs)]
    weight = graph.node_of["project.weight"]
    assert evidence.multiplies_zeros(graph, weight, [here])
    assert evidence.multiplies_zeros(graph, weight, points) == told
    assert not evidence.multiplies_zeros(graph, graph.node_of["project.bias"], points)


def test_a_reason_with_many_attempts_is_told_in_one_line(benchmark: Callable[[str], ModuleType]) -> None:
    plain = benchmark("coverage_words").plain
    first = "no narrow clone of /tmp/x/config.json runs: width 8 fails with DeadweightError: A"
    both = f"{first}; the last attempt fails with B"
    told = "no narrow clone runs either: A"
    assert (
        plain(f"cannot be built: DeadweightError: {both}")
        == f"it ran on none of the example inputs that were tried; {told}"
    )
    assert plain(f"cannot be traced: C; no evidence could be taken either: {both}") == f"cannot be traced: C; {told}"
    assert plain("more than 60 s") == "more than 60 s"
