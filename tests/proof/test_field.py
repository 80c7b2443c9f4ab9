"""Arithmetic modulo 2⁶¹ − 1 is exact: compared with Python's own integers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadweight.proof import field, labels
from deadweight.proof.field import P

ELEMENTS = st.one_of(st.integers(0, P - 1), st.sampled_from([0, 1, 2, P - 1, P - 2, 1 << 31, (1 << 60) + 1]))


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(ELEMENTS, ELEMENTS)
def test_sums_and_products_are_those_of_whole_numbers(a, b):
    assert int(field.plus(tensor(a), tensor(b))) == (a + b) % P
    assert int(field.minus(tensor(a), tensor(b))) == (a - b) % P
    assert int(field.times(tensor(a), tensor(b))) == a * b % P
    assert int(field.negative(tensor(a))) == -a % P


@given(ELEMENTS)
def test_an_element_times_its_inverse_is_one_unless_it_is_zero(a):
    assert int(field.times(tensor(a), field.inverse(tensor(a)))) == (1 if a else 0)


@given(ELEMENTS, st.integers(0, 130))
def test_doubling_turns_the_bits_round(a, n):
    assert int(field.doubled(tensor(a), n)) == (a << n) % P


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return field.generic(torch.randint(-(1 << 62), 1 << 62, shape, generator=torch.Generator().manual_seed(seed)))


def product_in_python(a: torch.Tensor, b: torch.Tensor) -> list[list[int]]:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) % P for column in b.T.tolist()] for row in a.tolist()]


def test_a_matrix_product_is_exact():
    a, b = random(3, 200), random(200, 4, seed=1)
    assert field.matmul(a, b).tolist() == product_in_python(a, b)


def test_a_matrix_product_is_exact_at_the_largest_numbers_and_beyond_one_block_of_terms(monkeypatch):
    monkeypatch.setattr(field, "LONGEST", 64)
    a, b = torch.full((2, 150), P - 1), torch.full((150, 2), P - 1)
    assert field.matmul(a, b).tolist() == product_in_python(a, b)


def test_batched_products_are_those_of_each_member():
    a, b = random(2, 1, 3, 5), random(4, 5, 2, seed=1)
    found = field.matmul(a, b)
    assert found.shape == (2, 4, 3, 2)
    assert found[1, 2].tolist() == product_in_python(a[1, 0], b[2])


def test_a_matrix_product_does_not_depend_on_how_float64_is_summed(monkeypatch):
    a, b = random(5, 300), random(300, 5, seed=1)
    expected = field.matmul(a, b)
    plain = torch.Tensor.__matmul__

    def perturbed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.shape[-1])
        return plain(x[..., order], y[..., order, :]) * (1 + 4 * torch.finfo(torch.float64).eps)

    monkeypatch.setattr(torch.Tensor, "__matmul__", perturbed)
    assert torch.equal(field.matmul(a, b), expected)


def test_sums_over_axes_do_not_overflow():
    x = torch.full((3, 1000), P - 1)
    assert field.total(x, [1]).tolist() == [-1000 % P] * 3
    place = torch.zeros(1000, dtype=torch.int64)
    assert int(field.add_at(torch.zeros(1, dtype=torch.int64), place, x[0])) == -1000 % P


def test_ranks_and_null_spaces_agree_with_each_other():
    low = field.matmul(random(6, 2), random(2, 5, seed=1))
    assert field.rank(low) == 2 and field.rank(random(6, 5)) == 5
    basis = field.null_space(low)
    assert basis.shape == (3, 5) and field.rank(basis) == 3
    assert not bool(field.matmul(low, basis.T).any())


def test_a_matrix_times_its_inverse_is_the_identity_and_a_singular_one_has_none():
    square = random(4, 4)
    found = field.inverted(square)
    assert found is not None
    assert torch.equal(field.matmul(square, found), torch.eye(4, dtype=torch.int64))
    assert field.inverted(field.matmul(random(4, 3), random(3, 4, seed=1))) is None


@pytest.mark.parametrize("number", [0, 1, -1, 0.125, -2.5, Fraction(3, 7), Fraction(-1000, 999)])
def test_small_fractions_come_back(number):
    assert field.fraction(field.of(number)) == Fraction(number)


def test_generic_numbers_are_no_small_fractions_and_infinity_is_no_number():
    assert field.as_real(random(20)) is None
    assert field.fraction(field.of(2**-0.5)) is None
    with pytest.raises(ValueError, match="no element"):
        field.of(float("inf"))


def test_equal_labels_give_equal_numbers_and_none_is_zero():
    drawn = field.generic(torch.arange(1000))
    assert len(drawn.unique()) == 1000 and bool((drawn > 0).all()) and bool((drawn < P).all())
    assert torch.equal(field.generic(torch.arange(1000)), drawn)


def test_powers_are_those_of_whole_numbers():
    a = field.generic(torch.arange(5))
    for exponent in (1, 2, 5, 12):
        assert field.power(a, exponent).tolist() == [pow(x, exponent, field.P) for x in a.tolist()]


@pytest.mark.parametrize("count", [field.FEW, field.FEW + 1])
def test_many_inverses_are_those_of_each(count):
    a = field.generic(torch.arange(count))
    assert bool((field.times(a, field.inverse(a)) == 1).all())
    assert int(field.inverse(torch.zeros(count, dtype=torch.int64)).abs().max()) == 0


def test_a_sum_over_no_axis_is_the_same():
    a = field.generic(torch.arange(6)).reshape(2, 3)
    assert torch.equal(field.total(a, []), a)


@pytest.mark.parametrize("number", [field.LARGEST_RATIO, Fraction(1, field.LARGEST_RATIO), 0])
def test_the_largest_fractions_come_back_and_larger_ones_do_not(number):
    assert field.fraction(field.of(number)) == number
    assert field.fraction(field.of(Fraction(field.LARGEST_RATIO + 1, field.LARGEST_RATIO))) is None


def unscrambled(y: int) -> int:
    """The label whose scrambled number is y."""
    word = (1 << 64) - 1

    def unshift(x: int, n: int) -> int:
        found = x
        for _ in range(64 // n):
            found = x ^ (found >> n)
        return found

    for n, factor in ((31, labels._C), (27, labels._B)):
        y = unshift(y, n) * pow(factor & word, -1, 1 << 64) & word
    y = unshift(y, 30) - labels._A & word
    return y - (1 << 64) if y >> 63 else y


@pytest.mark.parametrize("drawn", [0, P, 1 << 61, -1])
def test_no_label_stands_for_zero(drawn):
    label = tensor(unscrambled(drawn & ((1 << 64) - 1)))
    assert (int(labels.scramble(label)) - drawn) % (1 << 64) == 0
    assert 0 < int(field.generic(label)) < P


def test_what_has_no_answer_is_not_answered():
    with pytest.raises(AssertionError, match="singular"):
        field.inverted_or_fail(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(AssertionError, match="no terms"):
        field.matmul(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64))
