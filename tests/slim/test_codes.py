"""Rounding to a few bits, and codes in bytes."""

from __future__ import annotations

import pytest
import torch

from deadweight.slim.codes import LEVEL_ERRORS, WIDTHS, levels, reach, row


def run_of(width: int, n: int = 40) -> tuple[int, ...]:
    return tuple(n if w == width else 0 for w in WIDTHS)


@pytest.mark.parametrize("runs", [*(run_of(w) for w in WIDTHS), (8, 16, 0, 24, 8, 0, 40, 16), (0, 8, 8, 8, 8, 8, 8, 8)])
def test_packed_codes_come_back(runs: tuple[int, ...]) -> None:
    own = row(runs)
    generator = torch.Generator().manual_seed(sum(runs))
    most = 2**own.widths
    codes = (torch.rand(3, own.kept, 5, generator=generator) * most[:, None]).floor().to(torch.uint8)
    packed = own.pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, int(own.widths.sum()) // 8) == (3, 5, own.size)
    assert torch.equal(own.unpack(packed), codes)


def test_a_changed_byte_changes_the_codes_that_it_holds_and_no_others() -> None:
    own = row((0, 8, 0, 8, 0, 8, 0, 8))
    packed = own.pack(torch.zeros(own.kept, 1, dtype=torch.uint8))
    for i in range(own.size):
        changed = packed.clone()
        changed[0, i] = 255
        assert 1 <= int((own.unpack(changed) != 0).sum()) <= 8


@pytest.mark.parametrize("width", WIDTHS)
def test_levels_rise_are_symmetric_and_the_nearest_is_taken(width: int) -> None:
    values = levels(width)
    assert bool((values.diff() > 0).all()) and torch.allclose(values, -values.flip(0))
    z = torch.linspace(-6, 6, 2000, dtype=torch.float64)
    own = row(run_of(width, 8))
    rounded = own.values(own.encode(z.expand(8, -1)), torch.float64)[0]
    nearest = (z[:, None] - values).abs().min(1).values
    assert torch.allclose((z - rounded).abs(), nearest)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_error_of_a_normal_variable_is_the_one_that_bits_are_allocated_by(width: int) -> None:
    """By integration over the density; LEVEL_ERRORS has six digits."""
    z = torch.linspace(-9, 9, 360_000, dtype=torch.float64)
    density = torch.exp(-z * z / 2)
    own = row(run_of(width, 8))
    rounded = own.values(own.encode(z.expand(8, -1)), torch.float64)[0]
    error = (density * (z - rounded).pow(2)).sum() / density.sum()
    assert float(error) == pytest.approx(LEVEL_ERRORS[width], abs=1e-6)


def test_more_bits_are_always_better_and_uniform_levels_are_worse() -> None:
    assert list(LEVEL_ERRORS) == sorted(LEVEL_ERRORS, reverse=True)
    uniform = {2: 0.118846, 3: 0.037440, 4: 0.011543, 5: 0.003495}  # the best uniform quantisers of a normal variable
    assert all(LEVEL_ERRORS[width] < error for width, error in uniform.items())


def test_reach_lies_beyond_the_outermost_level_and_one_bit_has_none() -> None:
    assert reach(1) == float("inf") and all(reach(w) > float(levels(w)[-1]) for w in range(2, 9))
