"""A softmax written out as exponentials and their sum is one; a single thing else in it, and it is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

X = torch.randn(2, 5, 4)


class Head(nn.Module):
    """One attention head whose weights are a function of the scores."""

    def __init__(self, weights: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.weights(self.q(x) @ self.k(x).mT) @ self.v(x))


def stable(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda s: (e := s.exp()) / e.sum(-1, keepdim=True),
    "stable": stable,
}
NONE: dict[str, Callable[[Tensor], Tensor]] = {
    "one more in the sum": lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    "a sum over queries": lambda s: (e := s.exp()) / e.sum(-2, keepdim=True),
    "the sum of other exponentials": lambda s: s.exp() / (s / 2).exp().sum(-1, keepdim=True),
    "the maximum over queries": lambda s: (e := (s - s.amax(-2, keepdim=True)).exp()) / e.sum(-2, keepdim=True),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_softmax_by_hand_is_a_softmax(examine: Callable, name: str) -> None:
    told = examine(Head(BY_HAND[name]), X)
    assert (told.dof("DW002"), told.dof("DW003")) == (4, 4)


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_softmax_over_the_keys_keeps_both_biases(examine: Callable, name: str) -> None:
    told = examine(Head(NONE[name]), X)
    assert not told.found("DW002", "k.bias") and not told.found("DW003", "v.bias")
