"""The same answer on every machine: however a processor rounds and orders its sums, the report does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deadweight
from deadweight import embedded
from deadweight.audit.result import Audit

aten = torch.ops.aten
LAST_PLACES = 8  # units by which every product is off
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}


class AnotherMachine(TorchDispatchMode):
    """Adds the terms of every product and sum of floats in another order, and rounds the results otherwise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator, self.seen = torch.Generator().manual_seed(seed), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and args[PRODUCTS[func]].is_floating_point() and not args[PRODUCTS[func]].is_meta:
            args = self.reordered(args, PRODUCTS[func])
            return self.rounded(func(*args, **(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        return self.rounded(result) if func in SUMS and isinstance(result, Tensor) else result

    def reordered(self, args: Any, place: int) -> Any:
        left, right = args[place], args[place + 1]
        order = torch.randperm(left.shape[-1], generator=self.generator)
        return (*args[:place], left[..., order], right[..., order, :], *args[place + 2 :])

    def rounded(self, result: Tensor) -> Tensor:
        if not result.is_floating_point() or result.is_meta:
            return result
        self.seen += 1
        off = torch.rand(result.shape, generator=self.generator, dtype=torch.float64).to(result.dtype) - 0.5
        return result * (1 + 2 * LAST_PLACES * torch.finfo(result.dtype).eps * off)


def without_measurements(audit: Audit) -> Audit:
    """Everything that is claimed; how small the evidence came out to be is measured."""
    return replace(audit, findings=tuple(replace(f, evidence=None) for f in audit.findings), seconds=0.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "the embedded GPT-2": lambda: (str(embedded.path()), None),
    "encoder blocks": lambda: (nn.Sequential(*[Block() for _ in range(2)]), torch.randn(2, 4, 8)),
    "a decoder layer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 12, batch_first=True),
        (torch.randn(2, 3, 8), torch.randn(2, 4, 8)),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        torch.randn(2, 3, 5, 5),
    ),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))
def test_an_audit_does_not_depend_on_how_sums_are_rounded(build: Callable[[], tuple[Any, Any]]) -> None:
    model, inputs = build()
    expected = without_measurements(deadweight.audit(model, inputs))
    assert expected.findings
    for seed in (0, 1):
        with AnotherMachine(seed) as machine:
            outcome = deadweight.audit(model, inputs)
        assert machine.seen > 10
        assert without_measurements(outcome) == expected


def test_a_completeness_account_does_not_depend_on_how_sums_are_rounded() -> None:
    model, x = nn.Sequential(Block(), nn.Tanh()).eval(), torch.randn(2, 4, 8)
    expected = deadweight.audit(model, x, complete=True).completeness
    assert expected is not None and expected.measured == expected.explained > 100
    with AnotherMachine(0):
        assert deadweight.audit(model, x, complete=True).completeness == expected


def test_a_reduction_takes_out_the_same_numbers_however_sums_are_rounded() -> None:
    model, x = nn.Sequential(Block(), nn.Linear(8, 3)).eval(), torch.randn(2, 4, 8)
    expected = deadweight.reduce(model, inputs=x)
    with AnotherMachine(0):
        outcome = deadweight.reduce(model, inputs=x)
    assert outcome.parameters_after == expected.parameters_after
    assert outcome.steps == expected.steps
