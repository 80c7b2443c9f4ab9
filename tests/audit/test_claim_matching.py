"""A claim about the model and its counterpart about a narrow clone have the same identity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.claim_matching import ClaimIdentity, identities, roles
from deadweight.audit.clone_measurements import Measured
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.report.audit_json import to_json
from deadweight.report.audit_terminal import make_console, print_audit


class Stack(nn.Module):
    """Layers of a few LayerNorms and fused projections."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.read = nn.ModuleDict({"7": nn.Linear(width, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.read["7"](x)


def traced(model: nn.Module, width: int) -> Graph:
    return canonical(trace(model.double(), (torch.randn(2, 3, width, dtype=torch.float64),)))


def test_a_role_names_attributes_and_keys_but_no_position_in_a_list() -> None:
    known = roles(Stack(3, 4))
    assert known["layers.2.1.weight"] == known["layers.0.1.weight"] == ("layers", "weight")
    assert known["read.7.bias"] == ("read", "7", "bias")


def test_claims_about_a_deeper_wider_model_find_their_counterparts() -> None:
    large, small = Stack(4, 6), Stack(2, 4)
    graph, narrow = traced(large, 6), traced(small, 4)
    ours, theirs = search(graph).claims, search(narrow).claims
    assert ours
    known = identities(theirs, narrow, roles(small))
    assert {*identities(ours, graph, roles(large)).values()} == {*known.values()}


def test_where_the_counts_differ_the_worst_of_all_counterparts_counts() -> None:
    model = Stack(2, 4)
    graph = traced(model, 4)
    claims = search(graph).claims
    own = identities(claims, graph, roles(model))
    claim = claims[0]
    law, role, place, among = own[id(claim)]
    others = {ClaimIdentity(law, role, i, among + 1): 10.0**-i for i in range(among + 1)}
    measured = Measured(own, set(others), dict(others), faults={ClaimIdentity(law, role, among, among + 1): "a fault"})
    assert measured.evidence_of(claim) == 1.0
    assert measured.refuses(claim)
    exact = Measured(own, {own[id(claim)]}, {own[id(claim)]: 1e-16, **others}, faults=measured.faults)
    assert exact.evidence_of(claim) == 1e-16
    assert not exact.refuses(claim)
    assert place < among


class Wide(nn.Module):
    """A bias of a key projection, on so many positions that the labels of the scores are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1) @ x


@pytest.mark.parametrize(("length", "replayed"), [(8, True), (70, False)])
def test_steps_that_are_not_replayed_are_reported(
    length: int, replayed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    result = deadweight.audit(Wide(), (torch.randn(1, length, 4),))
    (finding,) = [f for f in result.findings if f.code == "DW002"]
    assert (finding.unreplayed == 0) == replayed
    data = [f for f in to_json(result)["findings"] if f["code"] == "DW002"]
    assert data[0]["unreplayed"] == finding.unreplayed
    print_audit(result, make_console(), proofs=True)
    assert ("not replayed by the checker" in capsys.readouterr().out) != replayed
