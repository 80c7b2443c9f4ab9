"""Traps for experts: what is added to their units, cut or read by others, and a gauge claimed all the same is false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deadweight.claims.point import Point
from deadweight.claims.turn_claim import TurnClaim
from deadweight.laws.catalogue import search

EXPERTS, UNITS = 3, 6
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # six rows: one for each unit
STAYS = 1e-11  # of outputs of order one: float64 rounds at about 1e-16


def chosen(m: Any, x: Tensor, between: Callable) -> Tensor:
    """Every row by the expert that data names."""
    rows = x.flatten(0, 1)
    index = (rows[:, 0] > 0).to(torch.int64) + (rows[:, 1] > 0).to(torch.int64)
    hidden = torch.matmul(m.up[index], rows.unsqueeze(-1)).squeeze(-1)
    hidden = torch.relu(between(m, hidden, index))
    return torch.matmul(m.down[index], hidden.unsqueeze(-1)).squeeze(-1)


def every(m: Any, x: Tensor, between: Callable, down: str = "back") -> Tensor:
    """Every row by every expert, along the first axis."""
    hidden = torch.bmm(x.flatten(0, 1).expand(EXPERTS, -1, -1), m.forth)
    return torch.bmm(torch.relu(between(hidden)), getattr(m, down))


# (m, x) → outputs, and how many units have a scale of their own in every expert
TRAPS: dict[str, tuple[Callable, int]] = {
    "no bias": (lambda m, x: chosen(m, x, lambda m, h, i: h), EXPERTS * UNITS),
    "a bias of each expert": (lambda m, x: chosen(m, x, lambda m, h, i: h + m.table[i]), EXPERTS * UNITS),
    "a bias that is computed": (
        lambda m, x: chosen(m, x, lambda m, h, i: h + F.embedding(i, torch.tanh(m.table))),
        0,
    ),
    "one number for all units of an expert": (
        lambda m, x: chosen(m, x, lambda m, h, i: h + F.embedding(i, m.thin)),
        0,
    ),
    "a sum of a parameter and the index": (lambda m, x: chosen(m, x, lambda m, h, i: h + (m.square + i)), 0),
    "a bias that others read": (
        lambda m, x: chosen(m, x, lambda m, h, i: h + m.table[i]) + torch.sin(m.table.sum()),
        0,
    ),
    "a bias whose rows others read": (
        lambda m, x: chosen(m, x, lambda m, h, i: (h + (r := m.table[i])) * torch.sin(r.sum())),
        0,
    ),
    "all experts": (lambda m, x: every(m, x, lambda h: h), EXPERTS * UNITS),
    "all experts, whose matrices are multiplied by themselves": (
        lambda m, x: torch.bmm(torch.relu(torch.bmm(m.own, m.own)), m.back) + x.mean(),
        0,
    ),
    "all experts, cut along the units": (lambda m, x: every(m, x, lambda h: h[..., :4], "cut"), EXPERTS * 4),
    "all experts, the first left out": (lambda m, x: every(m, x, lambda h: h[1:], "fewer"), 0),
    "all experts, their rows one expert further": (
        lambda m, x: every(m, x, lambda h: F.pad(h, (0, 0, 0, 0, 1, -1))),
        0,
    ),
    "all experts, the first two rows left out": (lambda m, x: every(m, x, lambda h: h[:, 2:]), 0),
}


def parts() -> dict[str, Tensor]:
    shapes = {"up": (EXPERTS, UNITS, 4), "down": (EXPERTS, 2, UNITS), "table": (EXPERTS, UNITS), "thin": (EXPERTS, 1)}
    shapes |= {"square": (UNITS, UNITS), "forth": (EXPERTS, 4, UNITS), "back": (EXPERTS, UNITS, 2)}
    shapes |= {"cut": (EXPERTS, 4, 2), "fewer": (EXPERTS - 1, UNITS, 2)}
    shapes |= {"own": (EXPERTS, UNITS, UNITS)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("forward", "free"), TRAPS.values(), ids=list(TRAPS))
def test_units_of_experts_trade_scales_only_where_all_that_they_meet_is_theirs(
    traced: Callable, assert_flat: Callable, forward: Callable, free: int
) -> None:
    graph = traced(lambda m, x: torch.tanh(forward(m, x)), (X,), **parts())
    claims = [c for c in search(graph).claims if isinstance(c, TurnClaim)]
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    for claim in claims:
        assert_flat(graph, claim, (X,))
        moved = point.at(claim.member(point, torch.Generator().manual_seed(0)))
        assert float((moved.outputs[0] - point.outputs[0]).abs().max()) < STAYS
    assert sum(c.dof for c in claims if any(s.expert is not None for s in c.sites)) == free
