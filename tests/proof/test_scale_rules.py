"""Every rule for scales: what it proves holds on numbers, and where one hypothesis is missing it stays silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import largest_difference
from deadweight.graph.trace import trace
from deadweight.proof.scale import SCALE_RULES, ScaleWalk
from deadweight.search.normalised_weight import candidates

Forward = Callable[[Tensor], Tensor]
ROWS, WHOLE = 0, 2  # places among the candidates of a matrix: one scale for each row, one for each column, one for all


class Weighted(nn.Module):
    """x times a matrix that is computed from a parameter p."""

    def __init__(self, function: Forward, shape: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(self.p)


def row_norm(p: Tensor) -> Tensor:
    return p.norm(dim=1, keepdim=True)


U = torch.randn(4, generator=torch.Generator().manual_seed(1))
SOUND: dict[str, list[tuple[Forward, int]]] = {
    "quotient": [(lambda p: p / row_norm(p), ROWS), (lambda p: p / p.norm(), WHOLE)],
    "reduction": [(lambda p: p / p.abs().sum(1, keepdim=True), ROWS), (lambda p: p / p.abs().amax(), WHOLE)],
    "product": [(lambda p: p * p / p.square().sum(1, keepdim=True), ROWS)],
    "power": [
        (lambda p: p * p.square().sum(1, keepdim=True).rsqrt(), ROWS),
        (lambda p: p / p.pow(4).mean(1, keepdim=True).sqrt().sqrt(), ROWS),
        (lambda p: p.pow(3) * row_norm(p).pow(2).reciprocal() / row_norm(p), ROWS),
    ],
    "addition": [(lambda p: (p - p.mean(1, keepdim=True)) / row_norm(p), ROWS)],
    "homogeneous": [(lambda p: -p.relu() / row_norm(p), ROWS)],
    "shape": [(lambda p: (p.T / row_norm(p).T).T.reshape(4, 4), ROWS)],
    "contraction": [
        (lambda p: p / torch.dot(U, torch.mv(p, U)), WHOLE),
        (lambda p: (p @ U)[:, None] / p.norm(), WHOLE),
    ],
    "norm": [
        (lambda p: nn.functional.layer_norm(p, (4,), eps=0.0), ROWS),
        (lambda p: nn.functional.rms_norm(p, (4,), eps=0.0), ROWS),
        (lambda p: nn.functional.group_norm(p.reshape(1, 4, 4), 4, eps=0.0).reshape(4, 4), ROWS),
        (lambda p: nn.functional.instance_norm(p.reshape(1, 4, 4), eps=0.0).reshape(4, 4), ROWS),
        (
            lambda p: nn.functional.batch_norm(p.reshape(1, 4, 4), None, None, training=True, eps=1e-30).reshape(4, 4),
            ROWS,
        ),
    ],
}
SILENT: dict[str, list[tuple[Forward, int]]] = {
    "quotient": [
        (lambda p: row_norm(p) / p / row_norm(p), ROWS),
        (lambda p: p / p.norm(), ROWS),
        (lambda p: (h := torch.div(p, 0.1, rounding_mode="floor")) / row_norm(h), ROWS),
    ],
    "reduction": [(lambda p: p / p.norm(dim=0, keepdim=True), ROWS), (lambda p: p / torch.norm(p, 0), WHOLE)],
    "product": [(lambda p: p * p / row_norm(p), ROWS)],
    "power": [
        (lambda p: p * p.square().sum(1, keepdim=True).sqrt(), ROWS),
        (lambda p: p**p / row_norm(p), ROWS),
        (lambda p: 2.0**p / row_norm(p), ROWS),
    ],
    "addition": [(lambda p: (p + 1) / row_norm(p), ROWS), (lambda p: p / (row_norm(p) + 0.1), ROWS)],
    "homogeneous": [(lambda p: p.relu() / p.norm(dim=0, keepdim=True), ROWS)],
    "shape": [(lambda p: p.T / row_norm(p), ROWS), (lambda p: (p * 2.0).chunk(2)[0].repeat(2, 1) / row_norm(p), ROWS)],
    "contraction": [
        (lambda p: p / torch.dot(U, torch.mv(p, U)), ROWS),
        (lambda p: (torch.eye(4) @ p.reshape(4, 2, 2).expand(4, 2, 2).repeat(1, 2, 2))[0] / p.norm(), WHOLE),
    ],
    "norm": [
        (lambda p: nn.functional.layer_norm(p, (4,), eps=0.0), 1),
        (lambda p: nn.functional.group_norm(p.reshape(1, 4, 4), 2, eps=0.0).reshape(4, 4), ROWS),
        (lambda p: nn.functional.batch_norm(p, None, None, training=True, eps=1e-30), ROWS),
    ],
}


def cases(table: dict[str, list[tuple[Forward, int]]]) -> list:
    return [pytest.param(r, *case, id=f"{r}-{i}") for r, found in table.items() for i, case in enumerate(found)]


@pytest.mark.parametrize(("rule", "forward", "place"), cases(SOUND))
def test_what_is_proved_of_a_scale_holds(rule: str, forward: Forward, place: int) -> None:
    module = Weighted(forward)
    graph = canonical(trace(module, (torch.randn(4, 4),)))
    source = graph.node_of["p"]
    parts = list(candidates(graph.nodes[source]))[place]
    scaled = ScaleWalk(graph, source, parts).run()
    assert scaled.proved, scaled.blocked
    assert rule in {SCALE_RULES[step.op].__name__ for step in scaled.steps}
    values = {n: t.detach().double() for n, t in graph.tensors.items()}
    inputs = {graph.inputs[0]: torch.randn(4, 4, dtype=torch.float64)}
    factors = torch.rand(int(parts.max()), dtype=torch.float64) + 0.5
    before = Point(graph, values, inputs)
    after = before.at({source: values[source] * factors[parts - 1]})
    assert largest_difference(before.outputs, after.outputs) < 1e-13  # a few roundings of float64
    for step in scaled.steps:
        gap = (before.nodes[step.node] - after.nodes[step.node]).abs() / before.nodes[step.node].abs().mean()
        assert (float(gap.max()) > 1e-6) == (step.value is not None), step


@pytest.mark.parametrize(("rule", "forward", "place"), cases(SILENT))
def test_a_scale_that_arrives_is_not_called_dead(rule: str, forward: Forward, place: int) -> None:
    graph = canonical(trace(Weighted(forward), (torch.randn(4, 4),)))
    source = graph.node_of["p"]
    scaled = ScaleWalk(graph, source, list(candidates(graph.nodes[source]))[place]).run()
    assert scaled.blocked is not None


def test_every_rule_for_scales_has_both_tests() -> None:
    names = {rule.__name__ for rule in SCALE_RULES.values()}
    assert names == set(SOUND) == set(SILENT)


def test_an_epsilon_is_remembered() -> None:
    module = Weighted(lambda p: nn.functional.layer_norm(p, (4,), eps=1e-3))
    graph = canonical(trace(module, (torch.randn(4, 4),)))
    source = graph.node_of["p"]
    assert ScaleWalk(graph, source, next(candidates(graph.nodes[source]))).run().epsilon == 1e-3
