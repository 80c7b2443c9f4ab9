"""Exact arithmetic: integers modulo the prime P = 2⁶¹ − 1, in int64 tensors.

A basis proof asks whether two expressions in unknown numbers are equal. Each unknown is drawn once, at random, from the
field; sums, products and contractions are then exact, whatever the processor, the library or the order of a sum. Two
different polynomials of degree n agree at a random point with probability n/P at most (Schwartz and Zippel).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from jaxtyping import Int64
from torch import Tensor

from deadweight.proof.labels import Labels, scramble

P = (1 << 61) - 1
Elements = Int64[Tensor, "..."]  # each in 0 … P − 1

LIMB = 16  # bits: four limbs hold an element
LONGEST = 1 << 14  # terms of a sum of limb products: below 2⁴⁶, so float64 holds it with room for rounding away
FEW = 2000  # elements that are faster inverted one by one
LARGEST_RATIO = 1 << 14  # of a fraction's numerator and denominator: a generic element is one with probability 2⁻³²


def generic(labels: Labels) -> Elements:
    """A random element other than 0 for each label."""
    drawn = scramble(labels) & P
    return torch.where((drawn == 0) | (drawn == P), torch.ones_like(drawn), drawn)


def of(number: float | int | Fraction) -> int:
    """A finite number as an element: floats are fractions with a power of two below."""
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{number} is no element of a field")
    exact = Fraction(number)
    return exact.numerator * pow(exact.denominator, -1, P) % P


def reduced(x: Tensor) -> Elements:
    """An integer in 0 … 2⁶³ − 1 modulo P: 2⁶¹ counts as 1."""
    x = (x & P).add_(x >> 61).sub_(P)
    return x.add_((x >> 63).bitwise_and_(P))  # P again where the difference is negative


def plus(a: Elements, b: Elements | int) -> Elements:
    return reduced(a + b)


def negative(a: Elements) -> Elements:
    return torch.where(a == 0, a, P - a)


def minus(a: Elements, b: Elements) -> Elements:
    return plus(a, negative(b))


def times(a: Elements, b: Elements | int) -> Elements:
    """a·b by halves of 31 bits: 2⁶² counts as 2."""
    b = torch.as_tensor(b, dtype=torch.int64)
    a1, a0, b1, b0 = a >> 31, a & 0x7FFFFFFF, b >> 31, b & 0x7FFFFFFF
    middle = (a1 * b0).add_(a0 * b1)  # below 2⁶²
    high = (a1 * b1).mul_(2).add_(middle >> 30)  # below 2⁶¹ + 2³²
    low = (middle & 0x3FFFFFFF).bitwise_left_shift_(31)
    return reduced(reduced(high.add_(low)).add_(reduced(a0 * b0)))


def power(a: Elements, exponent: int) -> Elements:
    result = torch.ones_like(a)
    for bit in bin(exponent)[2:]:
        result = times(result, result)
        result = times(result, a) if bit == "1" else result
    return result


def inverse(a: Elements) -> Elements:
    """1/a; 0 for 0. Few elements by Euclid, one by one; many together by Fermat."""
    if a.numel() > FEW:
        return power(a, P - 2)
    found = [pow(x, -1, P) if x else 0 for x in a.reshape(-1).tolist()]
    return torch.tensor(found, dtype=torch.int64).reshape(a.shape)


def total(x: Elements, axes: Sequence[int]) -> Elements:
    """Sums over axes: halves are added apart, which 2³² terms do not overflow."""
    if not axes:
        return x
    low, high = (x & 0x7FFFFFFF).sum(list(axes)), (x >> 31).sum(list(axes))
    return plus(times(reduced(high), 1 << 31), reduced(low))


def add_at(out: Elements, place: Tensor, values: Elements) -> Elements:
    """out + values at places along the last axis; a place may occur many times."""
    low = torch.zeros_like(out).scatter_add_(-1, place, values & 0x7FFFFFFF)
    high = torch.zeros_like(out).scatter_add_(-1, place, values >> 31)
    return plus(out, plus(times(reduced(high), 1 << 31), reduced(low)))


def matmul(a: Elements, b: Elements) -> Elements:
    """a @ b. Limbs of 16 bits are multiplied in float64, where every sum of so few of them is a whole number."""
    parts = [(a[..., i : i + LONGEST], b[..., i : i + LONGEST, :]) for i in range(0, a.shape[-1], LONGEST)]
    found: Elements | None = None
    for left, right in parts:
        product = limb_products(left, right)
        found = product if found is None else plus(found, product)
    assert found is not None, "a sum of no terms"
    return found


def limb_products(a: Elements, b: Elements) -> Elements:
    left = [((a >> (LIMB * i)) & 0xFFFF).to(torch.float64) for i in range(4)]
    right = [((b >> (LIMB * i)) & 0xFFFF).to(torch.float64) for i in range(4)]
    rows, columns = a.shape[-2], b.shape[-1]
    products = torch.cat(left, -2) @ torch.cat(right, -1)
    whole = products.round().to(torch.int64).unflatten(-2, (4, rows)).unflatten(-1, (4, columns))
    zero = torch.zeros((), dtype=torch.int64)
    terms = [
        doubled(sum((whole[..., i, :, k - i, :] for i in range(max(0, k - 3), min(k, 3) + 1)), zero), LIMB * k)
        for k in range(7)  # sums of four are below 2⁴⁸
    ]
    low = reduced(terms[0] + terms[1] + terms[2] + terms[3])  # four times P is below 2⁶³
    return reduced(low + terms[4] + terms[5] + terms[6])


def doubled(x: Tensor, times_: int) -> Tensor:
    """x·2ⁿ modulo P, at most P, of an integer below 2⁶¹: its 61 bits turn round."""
    n = times_ % 61
    return ((x << n) & P) | (x >> (61 - n)) if n else x


def echelon(matrix: Elements) -> tuple[Elements, list[int]]:
    """The reduced row echelon form (only the rows that are not 0) and the columns of its pivots."""
    rows, pivots = matrix.clone(), list[int]()
    for column in range(rows.shape[1]):
        below = rows[len(pivots) :, column].nonzero()
        if not len(below):
            continue
        at, here = len(pivots), len(pivots) + int(below[0])
        rows[[at, here]] = rows[[here, at]]
        rows[at] = times(rows[at], inverse(rows[at, column]))
        others = rows[:, column].clone()
        others[at] = 0
        touched = others.nonzero().reshape(-1)
        rows[touched] = minus(rows[touched], times(others[touched, None], rows[at]))
        pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows[: len(pivots)], pivots


def rank(matrix: Elements) -> int:
    return len(echelon(matrix)[1])


def null_space(matrix: Elements) -> Elements:
    """A basis of all x with matrix·x = 0, as rows; each has a 1 where the others have 0."""
    rows, pivots = echelon(matrix)
    free = [c for c in range(matrix.shape[1]) if c not in set(pivots)]
    basis = torch.zeros(len(free), matrix.shape[1], dtype=torch.int64)
    for i, column in enumerate(free):
        basis[i, column] = 1
        basis[i, pivots] = negative(rows[:, column])
    return basis


def inverted(matrix: Elements) -> Elements | None:
    """The inverse of a square matrix; None if there is none."""
    n = len(matrix)
    rows, pivots = echelon(torch.cat([matrix, torch.eye(n, dtype=torch.int64)], 1))
    return rows[:, n:] if pivots == list(range(n)) else None


def inverted_or_fail(matrix: Elements) -> Elements:
    """The inverse of a matrix that is known to have one."""
    found = inverted(matrix)
    assert found is not None, "singular"
    return found


def fraction(element: int) -> Fraction | None:
    """The fraction of small numbers that an element stands for; None if there is none (it is a generic number)."""
    r0, r1, t0, t1 = P, element % P, 0, 1
    while r1 > LARGEST_RATIO:
        q = r0 // r1
        r0, r1, t0, t1 = r1, r0 - q * r1, t1, t0 - q * t1
    return Fraction(r1, t1) if 0 < abs(t1) <= LARGEST_RATIO else None


def as_real(elements: Elements) -> Tensor | None:
    """The same numbers in float64, if each of them is a fraction of small numbers."""
    values, places = elements.unique(return_inverse=True)
    found = [fraction(int(v)) for v in values]
    if any(f is None for f in found):
        return None
    return torch.tensor([float(f) for f in found if f is not None], dtype=torch.float64)[places].reshape(elements.shape)
