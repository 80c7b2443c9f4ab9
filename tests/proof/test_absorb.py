"""Absorbers behind slices: a part of a parameter takes a shift over only if nothing else reads that part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.claims.claim import Title
from deadweight.claims.point import Point
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.proof.absorb import readings
from deadweight.proof.identity_labels import Identity
from deadweight.proof.shift import Outcome, Shift, ShiftWalk
from deadweight.search.prover import Prover
from deadweight.search.shifts import make_claim

X = torch.randn(5, 4, dtype=torch.float64)
TOKENS, ROWS = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([1, 0])
STEP = 1e-13  # of outputs of order one: float64 rounds at about 1e-16


def first_half(m: Any, x: Tensor) -> Tensor:
    """p meets q[:4]; the last element of q is read by nobody."""
    return torch.tanh(x + m.p + m.q[:4]) * torch.tanh(m.q[4:7].sum())


def split(m: Any, x: Tensor) -> Tensor:
    first, second, _ = m.q.split([4, 3, 1])
    return torch.tanh(x + m.p + first) * torch.tanh(second.sum())


def side_by_side(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(x + m.p + torch.cat([m.q[2:4] + m.r, m.q[4:6]])) * m.q[7]


ABSORBS = {
    "a slice": first_half,
    "a part of a split": split,
    "slices side by side": side_by_side,
    "a repeated slice": lambda m, x: torch.tanh(x + m.p.sum() + m.q[:1].expand(4)) * m.q[4],
    "every second element": lambda m, x: torch.tanh(x + m.p + m.q[::2]) * torch.tanh(m.q[1]),
}
TRAPS = {
    "slices that overlap": lambda m, x: torch.tanh(x + m.p + m.q[:4]) * torch.tanh(m.q[3:7].sum()),
    "a slice of what is read whole": lambda m, x: torch.tanh(x + m.p + m.q[:4]) * torch.tanh(m.q.sum()),
    "a slice that is added twice": lambda m, x: torch.tanh(x + m.p + (m.q[:4] + m.q[:4])) * m.q[5],
    "slices that overlap in one sum": lambda m, x: torch.tanh(x + m.p + (m.q[:4] + m.q[1:5])) * m.q[5],
    "a parameter added to itself": lambda m, x: torch.tanh(x + m.p + (m.s + m.s)),
    "a slice that is returned": lambda m, x: (torch.tanh(x + m.p + m.q[:4]) * m.q[7], m.q[3:5]),
    "a slice of what is returned whole": lambda m, x: (torch.tanh(x + m.p + m.q[:4]) * m.q[7], m.q),
    "side by side with another parameter": lambda m, x: torch.tanh(x + m.p + torch.cat([m.q[:2], m.r])) * m.q[3],
    "one number, side by side with another parameter": lambda m, x: (
        torch.tanh(x + m.p.sum() + torch.cat([m.q[:2], m.r])) * m.q[3]
    ),
    "side by side, one part read elsewhere": lambda m, x: torch.tanh(x + m.p + torch.cat([m.q[:2], m.q[3:5]])) * m.q[4],
    "a sum that weighs the parameter": lambda m, x: torch.tanh(torch.add(x + m.p, m.s, alpha=2)),
    "a sum that weighs the sum before it": lambda m, x: torch.tanh(torch.add(x + m.p, torch.add(m.s, x, alpha=2) * 2)),
    "a difference": lambda m, x: torch.tanh((x + m.p) - m.s) * m.s.sum(),
    "a sum inside that weighs the parameter": lambda m, x: torch.tanh(torch.add(x * x, m.s, alpha=2) + (x + m.p)),
    "a parameter that counts": lambda m, x: torch.tanh(x + m.p + m.counts),
    "a table that counts": lambda m, x: torch.tanh(x + m.p + F.embedding(TOKENS, m.steps)),
    "a table side by side with itself": lambda m, x: torch.tanh(
        torch.cat([e := F.embedding(TOKENS, m.t), e], -1) + (x + m.p).repeat(1, 2)
    ),
    "two sums, one of which is not shifted": lambda m, x: torch.tanh(x + m.p + m.s) * torch.sin(x + m.s),
    "two sums, and what is returned": lambda m, x: (torch.tanh(x + m.p + m.s) * torch.sin(x + m.s + m.p), m.s),
    "two sums, and what is read": lambda m, x: torch.tanh(x + m.p + m.s) * torch.sin(x + m.s + m.p) * m.s.sum(),
    "a parameter behind a function": lambda m, x: torch.tanh(x + m.p + torch.sin(m.s)),
    "a parameter behind a factor": lambda m, x: torch.tanh(x + m.p + 2.0 * m.s),
    "a sum that is returned": lambda m, x: (torch.tanh(x + m.p + (h := x * x + m.s)), h),
    "a sum that others read": lambda m, x: torch.tanh(x + m.p + (h := x * x + m.s)) * torch.sin(h),
    "a table that others read": lambda m, x: torch.tanh(x + m.p + F.embedding(TOKENS, m.t)) * torch.sin(m.t.sum()),
    "a table that is computed": lambda m, x: torch.tanh(x + m.p + F.embedding(TOKENS, torch.sin(m.t))),
    "a table in another order": lambda m, x: torch.tanh(x + m.p + F.embedding(TOKENS, m.t).flip(-1).cumsum(-1)),
    "side by side with a constant": lambda m, x: torch.tanh(x + m.p + torch.cat([m.q[:2], torch.ones(2)])) * m.q[7],
    "side by side with a table": lambda m, x: torch.tanh(
        x + m.p + torch.cat([m.u[:, 0], F.embedding(ROWS, m.u)[:, 1]])
    ),
    "one element at several places": lambda m, x: torch.tanh(x + m.p + m.q[:1].expand(4)) * m.q[4],
}


def walked(traced: Callable, forward: Callable) -> tuple[Graph, Prover, Outcome]:
    q = {"p": torch.randn(4), "q": torch.randn(8), "r": torch.randn(2), "s": torch.randn(4)}
    q |= {"t": torch.randn(3, 4), "u": torch.randn(2, 2)}
    counts = nn.Parameter(torch.arange(4), requires_grad=False)
    steps = nn.Parameter(torch.arange(12).reshape(3, 4), requires_grad=False)
    graph = traced(forward, (X,), **q, counts=counts, steps=steps)
    prover = Prover(graph)
    return graph, prover, prover.walk(graph.node_of["p"], torch.arange(1, 5), "biases")


@pytest.mark.parametrize("forward", ABSORBS.values(), ids=list(ABSORBS))
def test_a_part_that_is_read_once_takes_the_shift_over(traced: Callable, forward: Callable) -> None:
    graph, prover, outcome = walked(traced, forward)
    assert outcome.proved and {graph.parameters[a.parameter] for a, _ in outcome.absorbed.values()} == {"q"}
    claim = make_claim(prover, Title("DW017", "two"), graph.nodes[graph.node_of["p"]], torch.arange(1, 5), outcome)
    values = {n: t.detach() for n, t in graph.tensors.items()}
    bound = {graph.inputs[0]: X}
    moved = claim.member(Point(graph, values, bound), torch.Generator().manual_seed(0))
    before, after = evaluate(graph, values, bound), evaluate(graph, {**values, **moved}, bound)
    assert float((before[0] - after[0]).abs().max()) < STEP


@pytest.mark.parametrize("forward", TRAPS.values(), ids=list(TRAPS))
def test_a_part_that_is_read_elsewhere_takes_nothing_over(traced: Callable, forward: Callable) -> None:
    _, _, outcome = walked(traced, forward)
    assert not outcome.proved and not outcome.absorbed


def test_every_operand_that_reads_a_parameter_is_listed_with_its_elements(traced: Callable) -> None:
    graph = traced(lambda m, x: (x + m.q[:4] + m.q[2:6], m.q[7]), (X,), q=torch.randn(8))
    found = sorted(sorted(index.reshape(-1).tolist()) for index in readings(graph, graph.node_of["q"]).values())
    assert found == [[0, 1, 2, 3], [2, 3, 4, 5], [7]]


def test_one_parameter_takes_two_shifts_over_at_two_places(traced: Callable) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.one(x + m.p) + m.q[:3]) * torch.tanh(m.two(x + m.p) + m.q[3:6]) * m.q[7]

    one, two = (nn.Linear(4, 3, bias=False) for _ in range(2))
    graph = traced(forward, (X,), p=torch.randn(4), q=torch.randn(8), one=one, two=two)
    outcome = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5), "biases")
    assert outcome.proved and len(outcome.absorbed) == 2


def test_one_bias_of_two_sums_takes_the_same_amount_over_at_both(traced: Callable) -> None:
    graph, _, outcome = walked(traced, lambda m, x: torch.tanh(x + m.p + m.s) * torch.sin(x + m.s + m.p))
    assert outcome.proved and {graph.parameters[a.parameter] for a, _ in outcome.absorbed.values()} == {"s"}
    assert sorted(a.again for a, _ in outcome.absorbed.values()) == [False, True]


def test_a_source_that_reads_another_source_ends_the_walk(traced: Callable) -> None:
    graph = traced(lambda m, x: torch.tanh(m.one(x + m.p)), (X,), p=torch.randn(4), one=nn.Linear(4, 3, bias=False))
    linear = next(n.name for n in graph.nodes.values() if n.op == "linear")
    shifts = {
        name: Shift(torch.ones(graph.nodes[name].shape, dtype=torch.int64), torch.ones(()), fixed=True)
        for name in (graph.node_of["p"], linear)
    }
    blocked = ShiftWalk(graph, Identity(graph), shifts).run().blocked
    assert blocked is not None and blocked.why == "what it reads moves as well"


def test_one_bias_of_two_sums_does_not_take_different_amounts_over(traced: Callable) -> None:
    _, _, outcome = walked(traced, lambda m, x: torch.tanh(x + m.p + m.s) * torch.sin(x + m.s + 2.0 * m.p))
    assert not outcome.proved
