"""Rounding to a few bits, and codes in 16-bit units."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deadweight.slim.codes import (
    EXPONENTS,
    LOW_BITS,
    SHIFT,
    STEP_ERRORS,
    STEPS,
    Quantiser,
    Units,
    in_low_half,
    pack_units,
    scale_of,
    unpack_units,
)

WIDTHS = range(1, 9)
UNITS = [  # codes of keys in a unit, and the widths of units
    (1, [[8, 8], [3, 8], [0, 5]]),
    (2, [[4, 4, 4, 4], [6, 5, 4, 1], [0, 4, 2, 6], [8, 0, 2, 6], [1, 0, 0, 0]]),
    (3, [[3, 3, 3, 2, 3, 2], [4, 1, 5, 3, 0, 3]]),
    (4, [[2] * 8, [1, 2, 3, 4, 0, 3, 1, 2]]),
    (5, [[3, 4, 2, 4, 3]]),
    (8, [[2] * 8, [1] * 8]),
]


def units_of(key_fields: int, widths: list[list[int]]) -> Units:
    return Units.of(torch.tensor([widths, widths[::-1]]).transpose(1, 2).contiguous(), key_fields)


def quantiser(width: int) -> Quantiser:
    return Quantiser.of(torch.tensor([[[width]]]), torch.empty(0, dtype=torch.float64))


@pytest.mark.parametrize(("key_fields", "widths"), UNITS, ids=str)
def test_packed_codes_come_back_times_a_power_of_two(key_fields: int, widths: list[list[int]]) -> None:
    units = units_of(key_fields, widths)
    slots = units.widths.flatten(1)
    most = (1 << slots)[:, None]
    drawn = torch.rand(3, 2, 7, slots.shape[1], generator=torch.Generator().manual_seed(1))
    for codes in ((drawn * most).floor(), (most - 1).expand(3, -1, 7, -1).double(), torch.zeros_like(drawn)):
        rows = pack_units(units, codes)
        assert rows.dtype == torch.uint8 and rows.shape == (3, 2, 7, 2 * len(widths))
        numbers = unpack_units(rows, units.masks.to(torch.int16).unsqueeze(2), units.low, torch.float64)
        assert torch.equal(numbers, (codes * torch.exp2(units.shifts.flatten(1).double())[:, None]).double())


@pytest.mark.parametrize(("key_fields", "widths"), UNITS, ids=str)
def test_codes_of_a_unit_do_not_overlap_and_fit_a_float16_mantissa(key_fields: int, widths: list[list[int]]) -> None:
    units = units_of(key_fields, widths)
    low = torch.tensor(units.low)[:, None]
    bits = ((1 << units.widths) - 1) << units.offsets
    assert int(bits.sum(1).max()) < 1 << 16
    ones = torch.stack([(bits >> i) & 1 for i in range(16)])
    assert int(ones.sum(2).max()) == 1, "no bit belongs to two codes"
    assert int(units.masks.max()) < 1 << LOW_BITS
    assert torch.equal(torch.where(low, units.masks, units.masks << SHIFT), bits * (units.widths > 0))


def test_the_first_half_of_keys_and_of_values_lies_low() -> None:
    assert in_low_half(1, 1) == [True, False] and in_low_half(2, 2) == [True, False, True, False]
    assert (
        in_low_half(3, 3) == [True, True, False, True, False, False] and in_low_half(4, 0) == [True] * 2 + [False] * 2
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_nearest_level_is_taken(width: int) -> None:
    own = quantiser(width)
    for scale in (1.0, 1.7):
        levels = scale * (torch.arange(2**width) - (2**width - 1) / 2).double()
        y = torch.linspace(-1.5 * 2**width, 1.5 * 2**width, 4001, dtype=torch.float64)
        one = torch.tensor(scale, dtype=torch.float64)
        read = own.values(own.codes(y[:, None], one), one)[0, :, 0]
        nearest = (y[:, None] - levels).abs().min(1).values
        assert torch.allclose((y - read).abs(), nearest)


@pytest.mark.parametrize("width", WIDTHS)
def test_steps_are_the_best_for_a_normal_variable_and_errors_those_that_they_leave(width: int) -> None:
    """By integration over the density; the tables have six digits."""
    z = torch.linspace(-9, 9, 360_001, dtype=torch.float64)
    density = torch.exp(-z * z / 2)
    own, one = quantiser(width), torch.ones((), dtype=torch.float64)

    def error(step: float) -> float:
        read = step * own.values(own.codes(z[:, None] / step, one), one)[0, :, 0]
        return float((density * (z - read).square()).sum() / density.sum())

    assert error(STEPS[width]) == pytest.approx(STEP_ERRORS[width], abs=1e-6)
    assert all(error(STEPS[width] * factor) > error(STEPS[width]) for factor in (0.97, 1.03))


def test_more_bits_are_always_better_and_each_saves_less() -> None:
    saved = [a - b for a, b in itertools.pairwise(STEP_ERRORS)]
    assert saved == sorted(saved, reverse=True) and min(saved) > 0


@pytest.mark.parametrize("size", [0.3, 1.0, 1.01, 3.0, 50.0])
def test_the_scale_grows_as_far_as_nothing_is_clipped_and_no_further(size: float) -> None:
    own = quantiser(4)
    y = torch.tensor([[[size * 8.0]]], dtype=torch.float64)
    exponent = own.exponent(y)
    scale = float(scale_of(exponent, torch.float64))
    assert scale >= size or size < 1
    if int(exponent):
        assert float(scale_of(exponent - 1, torch.float64)) < size
    assert math.isclose(scale, 2 ** (int(exponent) ** 2 / 32))


def test_nan_takes_the_largest_scale_and_one_bit_codes_take_none() -> None:
    y = torch.tensor([[[float("nan")]]], dtype=torch.float64)
    assert int(quantiser(4).exponent(y)) == EXPONENTS - 1
    assert int(quantiser(1).exponent(torch.tensor([[[1e9]]], dtype=torch.float64))) == 0
