"""Labels are drawn by their predicted probabilities, and NaN and infinity are found."""

from __future__ import annotations

import math

import pytest
import torch

from deadweight.compress.measure import draw_labels, is_finite


def test_labels_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, -40.0])
    rows = 20_000
    labels = draw_labels(logits.expand(rows, -1), torch.Generator().manual_seed(0))
    frequency, wanted = torch.bincount(labels, minlength=5) / rows, logits.softmax(0)
    assert ((frequency - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt() + 1e-9).all()


def test_rare_labels_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a sum near 1, in float32, neighbours of 1e-8 have the same sum, and all but one would never be drawn."""
    logits = torch.full((100_000,), math.log(1e-8))
    logits[0] = math.log(0.999)
    sums = logits.softmax(0).cumsum(0, dtype=torch.float64)
    rare = torch.arange(70_000, 70_040)
    inside = (sums[rare - 1] + sums[rare]) / (2 * sums[-1])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: inside[:, None])
    assert torch.equal(draw_labels(logits.expand(len(rare), -1), torch.Generator()), rare)


@pytest.mark.parametrize("sure", [0, 3, 6])
def test_a_label_of_probability_one_is_always_drawn(sure: int) -> None:
    logits = torch.full((700, 7), -1e9)
    logits[:, sure] = 0.0
    assert (draw_labels(logits, torch.Generator().manual_seed(1)) == sure).all()


def test_the_same_seed_draws_the_same() -> None:
    logits = torch.randn(600, 50, generator=torch.Generator().manual_seed(0))
    first, again, other = (draw_labels(logits, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_nan_is_found(bad: float) -> None:
    x = torch.ones(4, 5)
    assert is_finite(x)
    x[2, 3] = bad
    assert not is_finite(x)


def test_infinities_that_cancel_are_found_and_large_numbers_are_finite() -> None:
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert is_finite(torch.full((8,), 3e38))
