"""The norm of the softmax Jacobian: what an eigendecomposition gives, and more digits than it where it runs out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deadweight.audit.run import one_thread
from deadweight.saturation.softmax_norm import softmax_norm

EXACT = 1e-12  # absolute, of numbers up to ½; eigvalsh itself is good to 1e-15


def by_decomposition(p: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(torch.diag_embed(p) - p[..., :, None] * p[..., None, :])[..., -1]


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("n", [2, 3, 7, 64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 30.0])
def test_it_is_the_largest_eigenvalue_of_random_rows(n: int, spread: float) -> None:
    random = torch.Generator().manual_seed(n)
    p = (spread * torch.randn(20, n, dtype=torch.float64, generator=random)).softmax(-1)
    with one_thread():
        assert (softmax_norm(p) - by_decomposition(p)).abs().max() < EXACT


@given(st.lists(st.integers(-40, 0), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_it_is_the_largest_eigenvalue_of_rows_full_of_ties(logits: list[int]) -> None:
    p = torch.tensor(logits, dtype=torch.float64).div(2).softmax(-1)
    assert abs(float(softmax_norm(p) - by_decomposition(p))) < EXACT


@pytest.mark.parametrize("n", [2, 3, 10, 1000])
def test_uniform_rows_have_one_over_n_and_two_equal_weights_one_half_at_any_length(n: int) -> None:
    half = torch.zeros(n, dtype=torch.float64)
    half[[0, n - 1]] = 0.5
    assert float(softmax_norm(torch.full((n,), 1 / n, dtype=torch.float64))) == pytest.approx(1 / n, rel=1e-14)
    assert float(softmax_norm(half)) == 0.5


def test_one_hot_rows_and_single_keys_have_zero() -> None:
    assert softmax_norm(rows([0, 1, 0], [1, 0, 0])).tolist() == [0, 0]
    assert softmax_norm(rows([1.0])).tolist() == [0]


def test_masked_keys_change_nothing() -> None:
    p = rows([0.5, 0.3, 0.2])
    padded = torch.nn.functional.pad(p, (3, 4))
    torch.testing.assert_close(softmax_norm(padded), softmax_norm(p))


@pytest.mark.parametrize("small", [1e-3, 1e-10, 1e-20, 1e-100, 1e-300, 5e-324])
def test_a_tiny_norm_has_all_its_digits(small: float) -> None:
    found = float(softmax_norm(rows([1 - small, small])))  # λ = 2p(1 − p)
    assert found == pytest.approx(2 * small * (1 - small), rel=1e-14, abs=0)


def test_the_bounds_of_the_proof_hold_for_every_row() -> None:
    random = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, 500, dtype=torch.float64)[:, None]
    p = (scale * torch.randn(500, 40, dtype=torch.float64, generator=random)).softmax(-1)
    norm, top = softmax_norm(p), p.topk(2).values
    rest = p.sort(-1).values[:, :-1].sum(-1)
    slack = 1 + 1e-14
    assert (top[:, 1] <= norm * slack).all() and (norm <= top[:, 0] * slack).all()
    assert (top[:, 0] * rest <= norm * slack).all() and (norm <= 2 * top[:, 0] * rest * slack).all()
    assert (norm <= 0.5).all()


def test_single_precision_is_taken_as_it_is_and_answered_in_double() -> None:
    p = torch.tensor([0.25, 0.75])
    assert softmax_norm(p).dtype == torch.float64 and float(softmax_norm(p)) == pytest.approx(0.375, rel=1e-14)
