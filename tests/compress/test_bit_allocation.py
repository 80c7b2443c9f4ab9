"""Bits for every coordinate, and units that coordinates share."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deadweight.compress.bit_allocation import (
    ERRORS,
    allocate_units,
    best_widths,
    fields_for,
    plan_row,
    share_units,
    wanted_bits,
)
from deadweight.slim.codes import LOW_BITS, SHIFT, UNIT, in_low_half


def costs(n: int, seed: int = 0, decay: float = 0.1) -> Tensor:
    """Falling like the spectra of keys."""
    draw = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (draw * torch.exp(-decay * torch.arange(n))).sort(descending=True).values


@pytest.mark.parametrize("low", [[True, False], [True, False, True, False], [True, True, False, False]], ids=str)
def test_widths_of_a_unit_are_the_best_of_all(low: list[bool]) -> None:
    own = torch.stack([costs(len(low), seed, 1.0) for seed in range(12)], 1)
    widths = best_widths(own, low)
    allowed = []
    for option in itertools.product(range(9), repeat=len(low)):
        lower = sum(w for w, is_low in zip(option, low, strict=True) if is_low)
        if lower <= LOW_BITS and max(lower, SHIFT) + sum(option) - lower <= UNIT:
            allowed.append(option)
    options = torch.tensor(allowed).T  # fields options
    best = (own[:, None] * ERRORS[options][:, :, None]).sum(0).min(0).values
    assert torch.allclose((own * ERRORS[widths]).sum(0), best)
    lower = widths[torch.tensor(low)].sum(0)
    assert int(lower.max()) <= LOW_BITS and int((widths.sum(0) - lower + lower.clamp(min=SHIFT)).max()) <= UNIT


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_wanted_bits_are_the_best_of_all(budget: int) -> None:
    own = costs(4, budget, 1.0)
    widths = wanted_bits(own, budget)
    options = [o for o in itertools.product(range(9), repeat=4) if sum(o) <= budget]
    best = min(float((own * ERRORS[list(o)]).sum()) for o in options)
    assert int(widths.sum()) <= budget and float((own * ERRORS[widths]).sum()) == pytest.approx(best)


def test_all_units_need_about_equally_many_bits() -> None:
    wanted = torch.tensor([[8, 6, 5, 4], [4, 3, 2, 1]])
    members = share_units(wanted, [True, False], [[0, 1]])
    assert sorted(members.flatten().tolist()) == list(range(8)), "every coordinate has one code"
    assert int(wanted.flatten()[members].sum(0).max()) <= 9
    apart = share_units(wanted, [True, False], [[0], [1]])
    assert all(sorted(field) == [0, 1, 2, 3] for field in apart.tolist()), "keys and values have codes of their own"


@pytest.mark.parametrize(
    ("units", "keys", "values"), [(32, 64, 64), (24, 64, 64), (16, 64, 64), (64, 64, 64), (9, 30, 11)]
)
def test_a_row_loses_little_more_than_bits_without_units_would(units: int, keys: int, values: int) -> None:
    own, other = costs(keys), costs(values, 1, 0.05)
    plan = plan_row(units, own, other)
    both = torch.cat([own, other])
    free = 0.5 * float((both * ERRORS[wanted_bits(both, UNIT * units)]).sum())
    assert free <= plan.loss * (1 + 1e-9) and plan.loss < 1.06 * free
    low = in_low_half(plan.key_fields, len(plan.widths) - plan.key_fields)
    lower = plan.widths[torch.tensor(low)].sum(0)
    assert int((plan.widths.sum(0) - lower + lower.clamp(min=SHIFT)).max()) <= UNIT
    for at, n in ((plan.coordinates[: plan.key_fields], keys), (plan.coordinates[plan.key_fields :], values)):
        stored = at[at >= 0].tolist()
        assert len(stored) == len(set(stored)) and max(stored) < n
    errors = plan.errors(keys)
    assert float(errors[0]) <= float(errors[-1]) <= 1.0 and (units == 64 or float(errors[0]) < float(errors[-1]))


@pytest.mark.parametrize("units", [32, 16])
def test_keys_that_belong_into_upper_halves_lie_there(units: int) -> None:
    own, other = costs(64), costs(64, 1, 0.05)
    upper = torch.arange(64) % 2 == 1
    plan = plan_row(units, own, other, upper)
    low = torch.tensor(in_low_half(plan.key_fields, 0))
    for half in (True, False):
        at = plan.coordinates[: plan.key_fields][low == half]
        assert at[at >= 0].numel() and bool((upper[at[at >= 0]] != half).all())
    assert plan_row(units, own, other).loss <= plan.loss < 1.06 * plan_row(units, own, other).loss
    uneven = plan_row(units, own, other, torch.arange(64) < 40)
    assert uneven.loss == plan_row(units, own, other).loss, (
        "where halves are not equal, no coordinate is left out for it"
    )
    anywhere = plan_row(64, own, other, upper)  # one code of keys in a unit: there are no halves to choose from
    assert torch.equal(anywhere.coordinates, plan_row(64, own, other).coordinates)


def test_a_row_without_values_is_one_of_keys_alone() -> None:
    plan = plan_row(6, costs(20), costs(0))
    assert plan.key_fields == len(plan.widths) == 4 and fields_for(6, 20, 0) == (4, 0)
    assert sorted(plan.coordinates[plan.coordinates >= 0].tolist()) == sorted(
        set(plan.coordinates[plan.coordinates >= 0].tolist())
    )


@pytest.mark.parametrize("budget", [5, 6, 9, 14, 100])
def test_the_allocation_of_units_is_the_best_of_all(budget: int) -> None:
    """Against every combination, for attentions whose options take different shares, and losses that are not convex."""
    generator = torch.Generator().manual_seed(budget)
    losses = [torch.rand(n, generator=generator, dtype=torch.float64).sort(descending=True).values for n in (3, 4, 2)]
    sizes = [1, 2, 1]
    chosen = allocate_units(losses, sizes, budget)
    taken = sum((k + 1) * size for k, size in zip(chosen, sizes, strict=True))
    best = min(
        float(sum(own[k] for own, k in zip(losses, o, strict=True)))
        for o in itertools.product(*(range(len(own)) for own in losses))
        if sum((k + 1) * size for k, size in zip(o, sizes, strict=True)) <= budget
    )
    assert taken <= budget
    assert float(sum(own[k] for own, k in zip(losses, chosen, strict=True))) == pytest.approx(best)
