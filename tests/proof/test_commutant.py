"""The group that leaves queries times keys alone, for every layout of rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.node import Graph
from deadweight.laws.catalogue import search
from deadweight.laws.dw009_query_key_basis import ContractionClaim
from deadweight.proof.commutant import Products, commutant_dimension, solutions

HEADS, HEAD, LENGTH = 2, 4, 8


def half_split(x: Tensor, size: int = HEAD) -> Tensor:
    first, second = x[..., :size].chunk(2, -1)
    cos, sin = waves(x, size)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., size:]], -1)


def interleaved(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = waves(x, HEAD)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def behind_prefix(x: Tensor) -> Tensor:
    """Class and register tokens come first and are not rotated."""
    return torch.cat([x[..., :5, :], half_split(x[..., 5:, :])], -2)


def waves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(x.shape[-2], dtype=x.dtype)
    angle = torch.outer(place, 10.0 ** -torch.arange(size // 2, dtype=x.dtype))
    return angle.cos(), angle.sin()


def claim(
    traced: Callable[..., Graph], turn: Callable[[Tensor], Tensor], groups: int = HEADS
) -> ContractionClaim | None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (m.query, m.key))
        k = k.repeat_interleave(HEADS // groups, 1)
        return torch.softmax(turn(q) @ turn(k).transpose(-1, -2), -1)

    inputs = (torch.randn(2, LENGTH, 6, dtype=torch.float64),)
    parts = {"query": nn.Linear(6, HEADS * HEAD), "key": nn.Linear(6, groups * HEAD)}
    found = [c for c in search(traced(forward, inputs, **parts)).claims if isinstance(c, ContractionClaim)]
    return found[0] if found else None


LAYOUTS = [
    ("none", lambda x: x, HEAD**2),
    ("half-split", half_split, 2 * HEAD // 2),
    ("interleaved", interleaved, 2 * HEAD // 2),
    ("partly rotated", lambda x: half_split(x, 2), 2 + 2**2),
    ("behind a prefix", behind_prefix, 2 * HEAD // 2),
]


@pytest.mark.parametrize(("turn", "per_head"), [e[1:] for e in LAYOUTS], ids=[e[0] for e in LAYOUTS])
@pytest.mark.parametrize("groups", [2, 1])
def test_the_group_is_counted_and_solved_alike(traced: Callable, turn: Callable, per_head: int, groups: int) -> None:
    found = claim(traced, turn, groups)
    assert found is not None
    assert found.dof == groups * per_head == len(list(found.generators()))


def random_products(count: int, left: int, right: int) -> Products:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(count, left, right, generator=generator, dtype=torch.float64)
    return Products(torch.arange(1, left + 1), torch.arange(left + 1, left + right + 1), matrices)


@pytest.mark.parametrize(("count", "free"), [(1, 9), (2, 3), (3, 1)])
def test_more_maps_leave_less_freedom(count: int, free: int) -> None:
    products = random_products(count, 3, 3)
    assert commutant_dimension(products) == free == len(solutions([products], 6))


def test_every_solution_solves_the_equations() -> None:
    products = random_products(2, 3, 3)
    for matrix in solutions([products], 6):
        left, right = matrix[1:4, 1:4], matrix[4:7, 4:7]
        assert torch.allclose(left.T @ products.matrices + products.matrices @ right, torch.zeros(2, 3, 3).double())


def test_no_square_map_means_no_answer() -> None:
    assert commutant_dimension(random_products(2, 3, 4)) is None
