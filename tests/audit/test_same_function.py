"""A traced program that is not the same function as the model proves nothing about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.same_function import apart


class OtherWhenTraced(nn.Module):
    """A LayerNorm that ignores the bias before it; where it is not traced, it may be left out."""

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.first, self.norm, self.other = nn.Linear(6, 6), nn.LayerNorm(6), other

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normed = torch.compiler.is_compiling() or not self.other
        return self.norm(x) if normed else x.sin()


@pytest.mark.parametrize("other", [False, True])
def test_a_model_that_is_traced_as_another_function_gets_no_findings(other: bool) -> None:
    module = OtherWhenTraced(other=other).eval()
    result = deadweight.audit(module, (torch.randn(2, 3, 6),))
    assert bool(result.findings) is not other
    said = [u.why for u in result.unknown if "is not the same function as the model" in u.why]
    assert len(said) == int(other)


def test_masked_entries_do_not_count_and_others_are_relative_to_the_largest() -> None:
    a, b = torch.tensor([1.0, -1e30, float("inf"), 4.0]), torch.tensor([1.0, -2e30, 3.0, 5.0])
    assert apart(a, b) == pytest.approx(0.2) and apart(a[1:3], b[1:3]) == 0.0


def test_a_number_that_only_the_program_makes_nan_is_a_difference() -> None:
    nan, number = torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.0])
    assert apart(nan, number) == float("inf")
    assert apart(number, nan) == apart(nan, nan) == 0.0
