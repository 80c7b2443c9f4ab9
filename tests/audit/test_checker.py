"""The checker refuses proofs that were tampered with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.audit.checker import replay, structure
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.laws.dw009_query_key_basis import ContractionClaim
from deadweight.laws.point import Point
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.turn_claim import TurnClaim
from deadweight.proof.shift import Shift

torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.output(torch.softmax(scores, -1) @ self.value(x))


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return canonical(trace(Attention().double(), (torch.randn(2, 3, 4, dtype=torch.float64),)))


@pytest.fixture(scope="module")
def claims(graph: Graph) -> list[Any]:
    return search(graph).claims


@pytest.fixture
def point(graph: Graph) -> Point:
    values = {n: t.detach() for n, t in graph.tensors.items()}
    return Point(graph, values, {graph.inputs[0]: torch.randn(2, 3, 4, dtype=torch.float64)})


def fault(claim: Any, point: Point) -> str:
    """Why one claim does not replay; empty if it does."""
    return replay([claim], point).get(0, "")


def pick(claims: list[Any], code: str) -> Any:
    return next(c for c in claims if c.code == code)


def test_honest_proofs_pass(graph: Graph, claims: list[Any], point: Point) -> None:
    assert {c.code for c in claims} >= {"DW002", "DW003", "DW009", "DW010"}
    assert structure(graph, claims) == {}
    assert replay(claims, point) == {}
    assert [fault(c, point) for c in claims] == [""] * len(claims)


def without_one(steps: tuple) -> Iterator[tuple]:
    for i in range(1, len(steps)):
        if steps[i].rule != "the space is written here":  # where a change begins nothing has to be read
            yield (*steps[:i], *steps[i + 1 :])


@pytest.mark.parametrize("code", ["DW002", "DW003", "DW009", "DW010"])
def test_a_missing_step_is_refused(graph: Graph, claims: list[Any], code: str) -> None:
    claim = pick(claims, code)
    for steps in without_one(claim.steps):
        nodes = {s.node for s in steps}
        if nodes != {s.node for s in claim.steps}:  # an absorbed node has two steps: its last one decides
            assert structure(graph, [replace(claim, steps=steps)]), steps


def test_a_proof_that_stops_at_the_output_is_refused(graph: Graph, claims: list[Any]) -> None:
    claim = pick(claims, "DW003")
    last = claim.steps[-1]
    steps = (*claim.steps[:-1], replace(last, node=graph.outputs[0], value=claim.steps[0].value))
    assert structure(graph, [replace(claim, steps=steps)])


def relabelled(claim: ShiftClaim, change: Any) -> ShiftClaim:
    def changed(value: Any) -> Any:
        return replace(value, label=change(value.label)) if isinstance(value, Shift) else value

    return replace(claim, steps=(claim.steps[0], *[replace(s, value=changed(s.value)) for s in claim.steps[1:]]))


@pytest.mark.parametrize("code", ["DW002", "DW003"])
def test_equal_labels_for_different_shifts_are_refused(
    graph: Graph, claims: list[Any], point: Point, code: str
) -> None:
    lie = relabelled(pick(claims, code), lambda label: torch.ones_like(label))
    assert fault(lie, point)


@pytest.mark.parametrize("code", ["DW002", "DW003"])
def test_a_shift_called_zero_is_refused(graph: Graph, claims: list[Any], point: Point, code: str) -> None:
    claim = pick(claims, code)
    steps = (claim.steps[0], *[replace(s, value=None) for s in claim.steps[1:]])
    assert fault(replace(claim, steps=steps), point)


@pytest.mark.parametrize("code", ["DW009", "DW010"])
def test_a_wrong_or_missing_site_is_refused(graph: Graph, claims: list[Any], point: Point, code: str) -> None:
    claim = pick(claims, code)
    assert isinstance(claim, (TurnClaim, ContractionClaim))
    for i, site in enumerate(claim.sites):
        if graph.parameters[site.parameter] == "key.bias":
            continue  # dead: it may stay where it is
        others = (*claim.sites[:i], *claim.sites[i + 1 :])
        assert "changes the outputs" in fault(replace(claim, sites=others), point), site
        if site.role in ("in", "out") and graph.nodes[site.parameter].shape == (4, 4):
            turned = replace(site, axis=1 - site.axis)
            assert "changes the outputs" in fault(replace(claim, sites=(*others, turned)), point), site


def test_a_key_bias_that_rotary_keeps_alive_is_refused_when_claimed_by_hand(claims: list[Any], graph: Graph) -> None:
    class Rotated(Attention):
        def forward(self, x: Tensor) -> Tensor:
            turn = torch.arange(3, dtype=x.dtype).cos().unsqueeze(-1)
            scores = self.query(x) @ (self.key(x) * turn).transpose(1, 2)
            return self.output(torch.softmax(scores, -1) @ self.value(x))

    other = canonical(trace(Rotated().double(), (torch.randn(2, 3, 4, dtype=torch.float64),)))
    assert structure(other, [pick(claims, "DW002")])
