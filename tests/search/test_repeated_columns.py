"""Columns of one matrix that read copies of one number are one column (DW017); copies at other places are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, sin, tanh

from .parts import X, matrix, numbers

Case = tuple[Callable[[Any, Tensor], Any], dict[str, Any], dict[str, int]]  # forward, parts, findings


def streams(x: Tensor, count: int) -> Tensor:
    return x.unsqueeze(-2).expand(*x.shape[:-1], count, x.shape[-1]).flatten(-2)


CASES: dict[str, Case] = {
    "twice": (
        lambda m, x: tanh(m.w(torch.cat([x, x], -1))),
        {"w": matrix(8, 3)},
        {"DW017 w.weight[:, 4:8]": 12},
    ),
    "in reverse": (
        lambda m, x: tanh(m.w(torch.cat([x, x.flip(-1)], -1))),
        {"w": matrix(8, 3)},
        {"DW017 w.weight[:, 4:8]": 12},
    ),
    "three streams": (lambda m, x: tanh(m.w(streams(x, 3))), {"w": matrix(12, 2)}, {"DW017 w.weight[:, 4:12]": 16}),
    "the matrix on the right": (
        lambda m, x: tanh(torch.cat([x, x], -1) @ m.w),
        {"w": numbers(8, 3)},
        {"DW017 w[4:8]": 12},
    ),
    "some channels": (
        lambda m, x: tanh(m.w(torch.cat([x, x[..., :1]], -1))),
        {"w": matrix(5, 3)},
        {"DW017 w.weight[:, 4:5]": 3},
    ),
    "the same function of both": (
        lambda m, x: tanh(m.w(sin(torch.cat([x, x], -1)))),
        {"w": matrix(8, 3)},
        {"DW017 w.weight[:, 4:8]": 12},
    ),
    "behind a norm": (
        lambda m, x: tanh(m.w(torch.nn.functional.rms_norm(torch.cat([x, x], -1), (8,)))),
        {"w": matrix(8, 3)},
        {"DW017 w.weight[:, 4:8]": 12},
    ),
    "another function": (lambda m, x: tanh(m.w(torch.cat([x, sin(x)], -1))), {"w": matrix(8, 3)}, {}),
    "the row before": (lambda m, x: tanh(m.w(torch.cat([x, x.roll(1, 1)], -1))), {"w": matrix(8, 3)}, {}),
    "another copy in the first row": (
        lambda m, x: tanh(m.w(torch.cat([x, torch.cat([sin(x[:, :1]), x[:, 1:]], 1)], -1))),
        {"w": matrix(8, 3)},
        {},
    ),
    "read twice": (
        lambda m, x: tanh(m.w(torch.cat([x, x], -1))) + tanh(m.w(torch.cat([x, sin(x)], -1))),
        {"w": matrix(8, 3)},
        {},
    ),
    "also returned": (lambda m, x: (tanh(m.w(torch.cat([x, x], -1))), m.w.weight * 1), {"w": matrix(8, 3)}, {}),
}


@pytest.mark.parametrize(("forward", "parts", "findings"), CASES.values(), ids=list(CASES))
def test_columns_that_read_copies_are_one(
    census: Callable, forward: Callable, parts: dict[str, Any], findings: dict[str, int]
) -> None:
    counted = census(forward, X, **parts)
    assert counted.findings == findings
    assert counted.unexplained == 0


def test_all_of_a_matrix_moves_to_another_that_reads_the_same_copies(census: Callable) -> None:
    """The dimensions that both laws could claim are counted once."""
    forward = lambda m, x: tanh(m.a(y := torch.cat([x, x], -1)) + m.b(y))  # noqa: E731
    counted = census(forward, X, a=matrix(8, 3), b=matrix(8, 3))
    assert counted.findings == {"DW020 b.weight": 24, "DW017 a.weight[:, 4:8]": 12}
    assert counted.unexplained == 0
