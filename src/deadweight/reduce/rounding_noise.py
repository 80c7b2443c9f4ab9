"""The rounding errors of a model's outputs, simulated in float64: the same number on every machine.

The error of a model in float32 depends on the order in which a library sums, and so on the processor. The choice of
rewrites must not. So the model is run in float64, and every result of an operation is multiplied, element by element,
by 1 + u·r: u is the unit roundoff of the precision that the operation has in the model, r a fixed pseudo-random number
between −1 and 1. Errors of the summands also model the rounding inside a sum: they remain where terms cancel.
"""

from __future__ import annotations

import zlib
from functools import cache

import torch
from torch import Tensor

from deadweight.graph.node import Node, Value
from deadweight.proof.operation_groups import SHAPE

NUMBERS = 1_000_003  # a prime, so that no two rows of a matrix get the same numbers of the table
LEAVES = {"parameter", "buffer", "constant", "input"}
SAME = {"aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.dropout", "output"}


def add_rounding(node: Node, value: Value, number: int) -> Value:
    """A value with about the rounding error that its operation has in the model's own precision."""
    if node.dtype is None or not node.is_float or node.op in LEAVES | SAME | SHAPE:
        return value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    start = zlib.crc32(f"{node.name}:{number}".encode()) % NUMBERS
    return value * (1 + torch.finfo(node.dtype).eps / 2 * numbers(value.numel(), start).view(value.shape))


def numbers(count: int, start: int) -> Tensor:
    """`count` numbers of the table, from `start` on, cyclically."""
    repeated = table().repeat(-(-(start + count) // NUMBERS)) if start + count > NUMBERS else table()
    return repeated[start : start + count]


@cache
def table() -> Tensor:
    """Uniform between −1 and 1."""
    return torch.rand(NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
