"""Labels are drawn as they are predicted, what is not a number is found, and dependence is measured."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from deadweight.heads.budget import MOST, answers_together, dependence
from deadweight.heads.moments import drawn, is_finite


def test_labels_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, -40.0])
    rows = 20_000
    labels = drawn(logits.expand(rows, -1), torch.Generator().manual_seed(0))
    found, wanted = torch.bincount(labels, minlength=5) / rows, logits.softmax(0)
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt() + 1e-9).all()


@pytest.mark.parametrize("sure", [0, 3, 6])
def test_what_is_certain_is_drawn(sure: int) -> None:
    logits = torch.full((700, 7), -1e9)
    logits[:, sure] = 0.0
    assert (drawn(logits, torch.Generator().manual_seed(1)) == sure).all()


def test_the_same_seed_draws_the_same() -> None:
    logits = torch.randn(600, 50, generator=torch.Generator().manual_seed(0))
    first, again, other = (drawn(logits, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_is_found(bad: float) -> None:
    x = torch.ones(4, 5)
    assert is_finite(x)
    x[2, 3] = bad
    assert not is_finite(x)


def test_infinities_that_cancel_are_found_and_large_numbers_are_finite() -> None:
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert is_finite(torch.full((8,), 3e38))


@pytest.mark.parametrize("common", [(1.0, 1.0), (1.0, 3.0)], ids=["independent", "dependent"])
def test_dependence_of_vectors_and_gradients_is_measured(common: tuple[float, float]) -> None:
    """If both have a size s in common, E(z·∂z)² is E s⁴ / (E s²)² times what independence gives, whatever the mean."""
    generator = torch.Generator().manual_seed(0)
    tokens, size = 200_000, 3
    scale = torch.tensor(common, dtype=torch.float64).repeat(tokens // 2)[:, None]
    z, g = (scale * torch.randn(2, tokens, size, dtype=torch.float64, generator=generator) for _ in range(2))
    z = z + torch.tensor([5.0, -2.0, 1.0], dtype=torch.float64)
    answer = (z * g).sum(-1, keepdim=True)
    moments = SimpleNamespace(
        heads=SimpleNamespace(heads=2, groups=1, d_v=size),
        merged=1,
        out=z.mT @ z / tokens,
        out_gradient=g.mT @ g / tokens,
        answer=answer.pow(2).mean((1, 2)),
        answer_gradient=(answer * g).mean(1),
    )
    both = SimpleNamespace(answers=answers_together(moments, z.mean(1)))  # type: ignore[arg-type]
    squares = [x**2 for x in common]
    wanted = 2 * (squares[0] ** 2 + squares[1] ** 2) / sum(squares) ** 2
    assert dependence([both, both]) == pytest.approx(wanted, rel=0.02)  # type: ignore[list-item]


def test_dependence_stays_within_reason() -> None:
    wild, none = (SimpleNamespace(answers=x) for x in ((100.0, 1.0), (0.0, 0.0)))
    assert dependence([wild]) == MOST and dependence([none]) == 1.0  # type: ignore[list-item]
