"""Motions of many claims are tried together and only where they matter: a false claim among them is still named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from deadweight.audit.checker import moved_along, replay_motions
from deadweight.audit.zero_gradients import same_outputs, unmoved_elements
from deadweight.claims.claim import Title
from deadweight.claims.point import Point
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate, largest_difference
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import every_law
from deadweight.proof.steps import Step

DEPTH, WIDTH = 4, 6


class Stack(nn.Module):
    """Layers, each with a bias that is added and one that is multiplied with 0, and a chain of linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.dead = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(DEPTH))
        self.chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer, dead in zip(self.layers, self.dead, strict=True):
            x = x + torch.tanh(layer(x)) + 0.0 * dead
        return self.chain(x)


@pytest.fixture
def graph() -> Graph:
    torch.manual_seed(0)
    return canonical(trace(Stack().double(), (torch.randn(2, WIDTH, dtype=torch.float64),)))


@pytest.fixture
def point(graph: Graph) -> Point:
    inputs = {graph.inputs[0]: torch.randn(2, WIDTH, dtype=torch.float64)}
    return Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, inputs)


def claimed_dead(graph: Graph, parameter: str) -> ShiftClaim:
    node = graph.node_of[parameter]
    step = Step(node, "parameter", "by assertion", "nothing follows")
    options = {"law": Title("DW000", "careless"), "dof": WIDTH, "verdict": "dead"}
    return ShiftClaim(node=node, steps=(step,), groups=torch.arange(1, WIDTH + 1), **options)


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize("known", [True, False])
def test_a_false_claim_among_many_true_ones_is_named_whether_values_are_known_or_not(
    graph: Graph, point: Point, layer: int, known: bool
) -> None:
    if known:
        assert point.nodes
    true = [claimed_dead(graph, f"dead.{i}") for i in range(DEPTH)]
    claims = dict(enumerate([*true, claimed_dead(graph, f"layers.{layer}.bias"), *true]))
    faults = replay_motions(claims, point)
    assert list(faults) == [DEPTH] and "changes the outputs" in faults[DEPTH]


def test_two_false_claims_that_come_in_different_halves_are_both_named(graph: Graph, point: Point) -> None:
    names = ["layers.0.bias", *(f"dead.{i}" for i in range(DEPTH)), "layers.3.bias"]
    assert sorted(replay_motions(dict(enumerate(claimed_dead(graph, n) for n in names)), point)) == [0, DEPTH + 1]


def test_claims_that_share_a_matrix_are_moved_along_one_after_the_other(graph: Graph, point: Point) -> None:
    chain = [c for c in every_law().search(graph).claims if c.law.code == "DW019"]
    assert len(chain) > 1  # bases of both spaces between three maps: the middle one is in both
    moved, faults = moved_along(dict(enumerate(chain)), point)
    assert not faults and largest_difference(point.outputs, moved.outputs) < 1e-10


@pytest.mark.parametrize("layer", range(DEPTH))
def test_outputs_computed_from_known_values_equal_those_of_a_full_run(graph: Graph, point: Point, layer: int) -> None:
    assert point.nodes
    moved = point.at({graph.node_of[f"layers.{layer}.bias"]: torch.randn(WIDTH, dtype=torch.float64)})
    moved = moved.at({graph.node_of["dead.1"]: torch.randn(WIDTH, dtype=torch.float64)})
    whole = evaluate(graph, moved.values, moved.inputs)
    assert torch.equal(moved.outputs[0], whole[0]) and not torch.equal(moved.outputs[0], point.outputs[0])
    afresh = replace(moved, origin=None).nodes
    assert moved.nodes.keys() == afresh.keys()
    assert all(torch.equal(moved.nodes[name], afresh[name]) for name in afresh if isinstance(afresh[name], Tensor))


def test_only_what_reads_a_moved_parameter_is_computed_again(graph: Graph, point: Point) -> None:
    seen: list[str] = []
    assert point.nodes and point.at({}).near is not None
    moved = point.at({graph.node_of["layers.3.bias"]: torch.ones(WIDTH, dtype=torch.float64)})
    known = moved.nodes
    seen = [name for name in graph.nodes if known[name] is not point.nodes[name]]
    assert graph.node_of["layers.3.bias"] in seen and set(graph.outputs) <= set(seen)
    assert len(seen) < len(graph.nodes) / 2


def test_candidates_that_keep_the_outputs_are_distinguished_from_the_others(graph: Graph, point: Point) -> None:
    names = ["layers.0.bias", "dead.0", "dead.1", "layers.2.weight", "dead.3"]
    marked = {graph.node_of[n]: torch.ones_like(point.values[graph.node_of[n]], dtype=torch.bool) for n in names}
    left = unmoved_elements(graph, point.values, lambda _: dict(point.inputs), marked)
    assert [graph.parameters[n] for n in left] == ["dead.0", "dead.1", "dead.3"]


class Saturated(nn.Module):
    """A unit that GELU holds at zero, up to rounding, and a vector that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dead = nn.Parameter(torch.randn(WIDTH))
        with torch.no_grad():
            self.first.bias[0] = -60.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x + self.dead - self.dead)))


@pytest.mark.parametrize("bias", [-60.0, -1e6], ids=["reached", "out of reach"])
def test_a_unit_that_is_only_flat_far_out_is_no_unmoved_parameter(bias: float) -> None:
    torch.manual_seed(0)
    module, x = Saturated().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    graph = canonical(trace(module, (x,), {}))
    values = dict(graph.tensors)
    name, live, dead = (graph.node_of[n] for n in ("first.bias", "second.bias", "dead"))
    values[name] = values[name].detach().clone().index_fill_(0, torch.tensor([0]), bias)
    only_first = torch.arange(WIDTH) == 0
    marked = {name: only_first, live: only_first, dead: torch.ones(WIDTH, dtype=torch.bool)}
    left = unmoved_elements(graph, values, lambda _: {graph.inputs[0]: x}, marked)
    assert set(left) == ({dead} if bias == -60.0 else {dead, name})  # no nearby point shows that the other one lives


class Elsewhere(Point):
    """Parameters that choose another path: there an expert gets another number of tokens than in the trace."""

    @property
    def outputs(self) -> list[Tensor]:
        raise RuntimeError("shape '[2, 8]' is invalid for input of size 8")


def test_parameters_that_choose_another_path_of_a_trace_on_given_values_are_not_unmoved(
    graph: Graph, point: Point
) -> None:
    fixed = replace(graph, specialised=("traced with the values of the example inputs",))
    assert not same_outputs(replace(point, graph=fixed), Elsewhere(fixed, point.values, point.inputs))
    assert same_outputs(point, point)
    with pytest.raises(RuntimeError):  # any other graph has one path: this would be a defect of ours
        same_outputs(point, Elsewhere(graph, point.values, point.inputs))
