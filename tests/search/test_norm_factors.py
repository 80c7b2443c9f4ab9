"""A norm's factor behind a linear map is the norm before it: W·x·f(x) = W·(x·f(x))."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, tanh

from .parts import X, matrix

ROTATIONS = 6  # of four channels


def factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def root(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


SPELLINGS: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "behind": lambda w, x: w(x) * factor(x),
    "the factor first": lambda w, x: factor(x) * w(x),
    "divided": lambda w, x: w(x) / root(x),
}
OTHERS: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "of half of the channels": lambda w, x: w(x) * factor(x[..., :2]),
    "of the image": lambda w, x: w(x) * factor(w(x)),
    "multiplied by the root": lambda w, x: w(x) * root(x),
}


def forward(read: Callable[[Callable, Tensor], Tensor]) -> Callable:
    """Two layers before it, so that the space is not that of the input."""
    return lambda m, x: tanh(read(m.w, torch.sin(x) @ m.a.weight.T))


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_space_before_the_factor_may_be_rotated(census: Callable, name: str) -> None:
    result = census(forward(SPELLINGS[name]), X, a=matrix(4, 4), w=matrix(4, 3))
    assert result.findings.get("DW012 a.weight") == ROTATIONS


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_factor_is_a_norm(census: Callable, name: str) -> None:
    result = census(forward(OTHERS[name]), X, a=matrix(4, 4), w=matrix(4, 3))
    assert not any(found.startswith("DW012") for found in result.findings)
