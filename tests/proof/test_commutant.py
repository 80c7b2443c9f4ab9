"""The group that leaves queries times keys alone, for every layout of rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.claims.action import Blockwise
from deadweight.claims.contraction_claim import ContractionClaim
from deadweight.claims.head_parts import HeadPart, turn_of
from deadweight.graph.node import Graph
from deadweight.laws.catalogue import search
from deadweight.proof import field
from deadweight.proof.commutant import Products, commutant, head_products, merged
from deadweight.proof.linear_form import Form, Slot
from deadweight.proof.normed_heads import Gram

HEADS, HEAD, LENGTH = 2, 4, 8


def commutant_dimension(products: Products) -> int | None:
    """The dimension of the group for one head; None if it is not known."""
    parts = commutant(products)
    return None if parts is None else sum(part.dimension for part in parts)


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
    assert found.dof == groups * per_head == len(list(found.basis()))


def products_of(*matrices: Any) -> Products:
    """Maps between the coordinates 1 … n and those after them; a letter is a number that depends on the position."""
    dense = torch.stack([m if isinstance(m, Tensor) else torch.tensor(m) for m in matrices])
    _, left, right = dense.shape
    entries = (dense != 0).any(0).nonzero()
    values = torch.tensor([[field.of(int(m[a, b])) for a, b in entries.tolist()] for m in dense])
    return Products(torch.arange(1, left + 1), torch.arange(left + 1, left + right + 1), entries, values)


def generic(seed: int) -> int:
    return int(field.generic(torch.tensor(seed)))


def complex_number(seed: int) -> Tensor:
    a, b = generic(2 * seed), generic(2 * seed + 1)
    return torch.tensor([[a, field.P - b], [b, a]])


def scattered(*blocks: Tensor) -> Tensor:
    size = sum(len(b) for b in blocks)
    out, at = torch.zeros(size, size, dtype=torch.int64), 0
    for b in blocks:
        out[at : at + len(b), at : at + len(b)] = b
        at += len(b)
    return out


def times(*matrices: Tensor) -> Tensor:
    product = matrices[0]
    for m in matrices[1:]:
        product = field.matmul(product, m)
    return product


def dense(seed: int) -> Tensor:
    return torch.tensor([[generic(4 * seed + i) for i in range(2)], [generic(4 * seed + i) for i in (2, 3)]])


ONE = torch.eye(2, dtype=torch.int64)
TURN, BACK = dense(77), field.inverted_or_fail(dense(77))
CASES = [
    (
        "maps that vanish at the first pair of positions",
        [
            torch.zeros(2, 2, dtype=torch.int64),
            *(torch.diag(torch.tensor([generic(s), generic(s + 9)])) for s in (1, 2, 3)),
        ],
        2,
    ),
    (
        "two planes, one behind a number that is learned",
        [scattered(complex_number(s), field.times(complex_number(s), generic(99))) for s in range(3)],
        4,
    ),
    (
        "two planes in bases that no fraction takes into each other",
        [scattered(complex_number(s), times(TURN, complex_number(s), BACK, BACK.T.contiguous())) for s in range(3)],
        2,
    ),
    (
        "two planes of the same traces that are not alike",
        [scattered(ONE, ONE), scattered(torch.tensor([[1, 1], [2, 1]]), torch.tensor([[1, 1], [4, 1]]))],
        4,
    ),
    ("one map leaves all matrices", [ONE], 4),
    ("one map with scales, mirrored", [torch.tensor([[0, 4], [-2, 0]])], 4),
    ("scales that positions share", [ONE * generic(1), ONE * generic(2)], 4),
    (
        "a scale of its own for each coordinate",
        [scattered(*torch.tensor([[[generic(s)]], [[generic(s + 9)]]])) for s in (1, 2, 3)],
        2,
    ),
    ("one map that is not normal, beside none", [ONE, torch.tensor([[1, generic(5)], [0, 1]])], 2),
    ("complex numbers", [complex_number(s) for s in range(3)], 2),
    ("two planes of one frequency", [scattered(complex_number(s), complex_number(s)) for s in range(3)], 8),
    ("a plane and its mirror image", [scattered(complex_number(s), complex_number(s).T) for s in range(3)], 8),
    ("two planes of two frequencies", [scattered(complex_number(s), complex_number(s + 50)) for s in range(3)], 4),
    (
        "all matrices leave only numbers",
        [dense(s) for s in range(5)],
        1,
    ),
]


@pytest.mark.parametrize(("maps", "free"), [e[1:] for e in CASES], ids=[e[0] for e in CASES])
def test_the_group_of_known_maps(maps: list[Tensor], free: int) -> None:
    assert commutant_dimension(products_of(*maps)) == free


@pytest.mark.parametrize("maps", [e[1] for e in CASES], ids=[e[0] for e in CASES])
def test_every_element_solves_the_equations_exactly(maps: list[Tensor]) -> None:
    products = products_of(*maps)
    parts = commutant(products)
    assert parts is not None
    for part in parts:
        head = HeadPart(0, part, products.left[part.left][None], products.right[part.right])
        z = torch.randint(-9, 10, (1, part.count, part.count, part.entry)).to(torch.float64)
        queries, keys = turn_of([head], z, finite=False)
        x, y = (whole(side, len(products.left) * 2) for side in (queries, keys))
        n = len(products.left)
        for m in torch.stack([m if isinstance(m, Tensor) else torch.tensor(m) for m in maps]):
            m = torch.tensor([[field.of(int(v)) for v in row] for row in m])
            left, right = (
                torch.tensor([[field.of(float(v)) for v in row] for row in s]) for s in (x[:n, :n].T, y[n:, n:])
            )
            assert not bool(field.plus(field.matmul(left, m), field.matmul(m, right)).any())


def whole(part: Blockwise, size: int) -> Tensor:
    out = torch.zeros(size, size, dtype=torch.float64)
    for index, u, v in zip(part.index - 1, part.u, part.v, strict=True):
        out[index[:, None], index[None, :]] = u @ v.T
    return out


def test_no_square_map_means_no_answer() -> None:
    assert commutant_dimension(products_of([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]])) is None


def chained(count: int) -> Tensor:
    """Maps of so many coordinates, each of which meets the next."""
    return torch.eye(count, dtype=torch.int64) + torch.diag(torch.ones(count - 1, dtype=torch.int64), 1)


@pytest.mark.parametrize(("count", "summed", "known"), [(4, True, True), (5, True, False), (5, False, True)])
def test_random_sums_stand_for_positions_only_where_few_coordinates_are_linked(
    count: int, summed: bool, known: bool
) -> None:
    products = replace(products_of(chained(count), chained(count).T), summed=summed)
    assert (commutant(products) is not None) == known


def test_too_many_linked_coordinates_are_not_solved() -> None:
    assert commutant(products_of(chained(16))) is not None
    assert commutant(products_of(chained(17))) is None


UNLIKE: dict[str, tuple[Any, ...]] = {
    "other values": (ONE * 2, torch.tensor([[1, 0], [0, 3]])),
    "other places": (torch.tensor([[0, 1], [1, 0]]),),
    "one map more": (ONE, torch.tensor([[1, 0], [0, 2]])),
}


@pytest.mark.parametrize("maps", UNLIKE.values(), ids=list(UNLIKE))
def test_heads_that_meet_through_other_maps_are_not_alike(maps: tuple[Any, ...]) -> None:
    own = products_of(ONE)
    assert own.like(products_of(ONE)) and not own.like(products_of(*maps))


def test_products_of_the_same_heads_are_merged() -> None:
    turned = products_of(*(complex_number(s) for s in range(3)))
    assert commutant_dimension(merged([products_of(ONE), turned])) == commutant_dimension(turned) == 2
    assert commutant_dimension(merged([products_of(ONE)])) == 4


def test_coordinates_that_never_meet_have_no_entries() -> None:
    factor = torch.ones(2, 2, dtype=torch.int64)
    left, right = (Form((Slot(torch.tensor(c), factor),)) for c in ([[1, 0], [1, 0]], [[0, 0], [2, 2]]))
    (product,) = head_products(left, right)
    assert product.left.tolist() == [1] and product.right.tolist() == [2] and not len(product.entries)


def test_a_group_that_depends_on_the_numbers_drawn_is_not_claimed() -> None:
    lone = torch.tensor([[generic(i) for i in range(2)], [generic(i) for i in (2, 3)]])
    assert commutant(products_of(lone)) == []


def test_a_gram_matrix_that_links_a_part_to_others_says_nothing_about_it() -> None:
    values = torch.tensor([[[1, 0, 0], [0, 1, 5], [0, 5, 1]]])
    gram = Gram(torch.tensor([3, 4, 7]), values)
    assert gram.on(torch.tensor([3, 4])) is None
    assert gram.on(torch.tensor([4, 7])) is not None and gram.on(torch.tensor([3])) is not None
