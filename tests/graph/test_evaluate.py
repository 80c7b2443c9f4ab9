"""Two runs compared: NaN must not count as no difference."""

from __future__ import annotations

import math

import pytest
import torch

from deadweight.graph.evaluate import largest_difference

NAN, INF = math.nan, math.inf
SAME = [
    ([1.0, NAN], [1.0, NAN]),
    ([1.0, -INF], [1.0, -INF]),
    ([NAN, NAN], [NAN, NAN]),
    ([], []),
]
FAR = [
    ([1.0, 2.0], [1.0, NAN]),
    ([1.0, NAN], [1.0, 2.0]),
    ([1.0, NAN], [NAN, 1.0]),
    ([1.0, INF], [1.0, -INF]),
    ([1.0, INF], [1.0, NAN]),
    ([NAN, NAN], [INF, NAN]),
    ([1.0, 2.0], [1.0, INF]),
]


def outputs(values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.float64)]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_equal_elements_do_not_differ(before: list[float], after: list[float]) -> None:
    assert largest_difference(outputs(before), outputs(after)) == 0.0


@pytest.mark.parametrize(("before", "after"), FAR)
def test_nan_or_infinity_on_one_side_only_is_an_infinite_difference(before: list[float], after: list[float]) -> None:
    assert largest_difference(outputs(before), outputs(after)) == INF


def test_finite_numbers_differ_relative_to_the_largest() -> None:
    assert largest_difference(outputs([4.0, 1.0]), outputs([4.0, 2.0])) == 0.25


@pytest.mark.parametrize("fill", [-INF, INF, NAN, -3.4e38], ids=str)
def test_a_mask_beside_the_others_hides_no_difference(fill: float) -> None:
    assert largest_difference(outputs([4.0, 1.0, fill]), outputs([4.0, 2.0, fill])) == 0.25


def test_a_changed_integer_is_an_infinite_difference() -> None:
    places = [torch.tensor([1, 2])]
    assert largest_difference(places, [torch.tensor([1, 3])]) == INF
    assert largest_difference(places, [torch.tensor([1, 2])]) == 0.0


def test_complex_outputs_are_compared() -> None:
    assert largest_difference([torch.tensor([2j, 1.0])], [torch.tensor([2j, 0.0])]) == 0.5
