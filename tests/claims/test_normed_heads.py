"""Of the turns of a head, those that keep the length that a norm divides by; where they are not known, none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadweight.claims.head_parts import HeadPart
from deadweight.claims.normed_heads import directions, keeping_lengths
from deadweight.proof import field
from deadweight.proof.commutant import Products, commutant
from deadweight.proof.normed_heads import Gram

ONE = [[1, 0], [0, 1]]
QUERIES, KEYS = [1, 2], [3, 4]


def generic(seed: int) -> int:
    return int(field.generic(torch.tensor(seed)))


def complex_number(seed: int) -> list[list[int]]:
    a, b = generic(2 * seed), generic(2 * seed + 1)
    return [[a, field.P - b], [b, a]]


def twice(matrix: list[list[int]]) -> list[list[int]]:
    """The same map on two planes."""
    zero = [0] * len(matrix)
    return [[*row, *zero] for row in matrix] + [[*zero, *row] for row in matrix]


def head(*maps: list[list[int]]) -> list[HeadPart]:
    """The parts of a head whose queries, 1 … n, meet its keys, those after them, through these maps."""
    dense = torch.tensor([[[field.of(v) for v in row] for row in m] for m in maps])
    size = dense.shape[-1]
    entries = (dense != 0).any(0).nonzero()
    left, right = torch.arange(1, size + 1), torch.arange(size + 1, 2 * size + 1)
    parts = commutant(Products(left, right, entries, dense[:, entries[:, 0], entries[:, 1]]))
    assert parts is not None
    return [HeadPart(0, part, left[part.left][None], right[part.right]) for part in parts]


def norm(coordinates: list[int], *values: list[list[int]]) -> Gram:
    return Gram(torch.tensor(coordinates), torch.tensor([[[field.of(v) for v in row] for row in g] for g in values]))


def diagonal(*numbers: int) -> list[list[int]]:
    return torch.diag(torch.tensor(numbers)).tolist()


SCALED = [diagonal(3, 3), diagonal(generic(7), generic(7))]
PLANES = [twice(complex_number(s)) for s in range(3)]
# The maps between queries and keys, the norms, and how many dimensions are left.
CASES: dict[str, tuple[list, list[Gram], int]] = {
    "no norm": ([ONE], [], 4),
    "a norm of other coordinates": ([ONE], [norm([8, 9], ONE)], 4),
    "a norm of the queries": ([ONE], [norm(QUERIES, ONE)], 1),
    "a norm of the keys": ([ONE], [norm(KEYS, ONE)], 1),
    "norms of both": ([ONE], [norm(QUERIES, ONE), norm(KEYS, *SCALED)], 1),
    "a norm that weighs its elements": ([ONE], [norm(QUERIES, diagonal(1, 2))], 0),
    "a norm that weighs its elements at one position": ([ONE], [norm(QUERIES, ONE, diagonal(1, 2))], 0),
    "a norm that weighs the keys alone": ([ONE], [norm(QUERIES, ONE), norm(KEYS, diagonal(1, 2))], 0),
    "a norm of sums": ([ONE], [norm(QUERIES, [[1, 1], [1, 1]])], 0),
    "a norm of one coordinate": ([ONE], [norm([1], [[1]])], 0),
    "a norm of one coordinate and another head's": ([ONE], [norm([2, 9], ONE)], 0),
    "a norm of more coordinates": ([ONE], [norm([1, 2, 9], diagonal(1, 1, 5))], 1),
    "a norm that links the head to another": ([ONE], [norm([1, 2, 9], [[1, 0, 0], [0, 1, 2], [0, 2, 1]])], 0),
    "keys that are weighed before they meet": ([[[0, 4], [-2, 0]]], [norm(KEYS, ONE)], 0),
    "a plane": ([complex_number(s) for s in range(3)], [norm(QUERIES, ONE)], 1),
    "a plane whose elements are weighed": ([complex_number(s) for s in range(3)], [norm(KEYS, diagonal(1, 2))], 0),
    "two planes, each normed": (PLANES, [norm([1, 2], ONE), norm([3, 4], ONE)], 0),
    "two planes of one frequency": (PLANES, [norm([1, 2, 3, 4], diagonal(1, 1, 1, 1))], 0),
    "turns that are no whole numbers": ([ONE, [[1, 1], [2, 1]]], [norm(QUERIES, diagonal(1, -2))], 0),
    "turns that are no whole numbers, one element left out": (
        [ONE, [[1, 1], [2, 1]]],
        [norm(QUERIES, diagonal(0, 1))],
        0,
    ),
    "turns that depend on the numbers drawn": (
        [[[1, 1], [1, 2]]],
        [norm(QUERIES, diagonal(generic(5), generic(6)))],
        0,
    ),
    "turns that keep a length that is weighed": ([[[1, 1], [1, 2]]], [norm(QUERIES, diagonal(2, 3))], 1),
}


@pytest.mark.parametrize(("maps", "norms", "free"), CASES.values(), ids=list(CASES))
def test_a_norm_leaves_what_keeps_the_length_it_divides_by(maps: list, norms: list[Gram], free: int) -> None:
    kept = keeping_lengths(head(*maps), norms)
    assert sum(part.dimension for part in kept) == free
    for part in kept:
        assert len(list(directions(part))) == part.dimension
        for unit in directions(part):
            assert_lengths_kept(part, unit, norms)


def assert_lengths_kept(part: HeadPart, z: Tensor, norms: list[Gram]) -> None:
    """G·X is antisymmetric on the coordinates of every norm, for queries and for keys."""
    t, w = part.part.left_basis, part.part.right_basis
    sides = [(part.left[0], t, z, part.part.left_entries), (part.right, w, z.transpose(0, 1), part.part.right_entries)]
    for coordinates, basis, rows, entries in sides:
        back = torch.linalg.inv(basis)
        x = torch.einsum("kij,klb,bjm,lmo->kilo", basis, rows, entries, back).reshape([len(coordinates)] * 2)
        exact = torch.tensor([[field.of(v) for v in row] for row in x.tolist()])
        for norm in norms:
            own = norm.on(coordinates) if bool(torch.isin(coordinates, norm.coordinates).all()) else None
            for gram in [] if own is None else own:
                product = field.matmul(gram, exact)
                assert not bool(field.plus(product, product.T).any())
