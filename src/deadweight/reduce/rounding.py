"""What rounding adds to a model's outputs, simulated in float64: the same number on every machine.

How far a model in float32 is off depends on the order in which a library sums, and so on the processor. Which rewrites
are carried out must not. So the model is run in float64, and every value that an operation returns is multiplied,
element by element, by 1 + u·r: u is the unit roundoff of the precision that the operation has in the model, r is a
fixed pseudo-random number between −1 and 1. An activation that is off by u·r before it is summed up stands for the
rounding inside that sum too: terms that cancel leave the same error behind.
"""

from __future__ import annotations

import zlib
from functools import cache

import torch
from torch import Tensor

from deadweight.graph.node import Node, Value
from deadweight.proof.opsets import SHAPE

NUMBERS = 1_000_003  # a prime: rows of a matrix meet the numbers of the table out of step
LEAVES = {"parameter", "buffer", "constant", "input"}
SAME = {"aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.dropout", "output"}


def rounded(node: Node, value: Value, number: int) -> Value:
    """A value as its operation would return it in the model's own precision, or so."""
    if node.dtype is None or not node.is_float or node.op in LEAVES | SAME | SHAPE:
        return value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    start = zlib.crc32(f"{node.name}:{number}".encode()) % NUMBERS
    return value * (1 + torch.finfo(node.dtype).eps / 2 * numbers(value.numel(), start).view(value.shape))


def numbers(count: int, start: int) -> Tensor:
    """So many numbers of the table, from `start`, and round again."""
    repeated = table().repeat(-(-(start + count) // NUMBERS)) if start + count > NUMBERS else table()
    return repeated[start : start + count]


@cache
def table() -> Tensor:
    """Uniform between −1 and 1."""
    return torch.rand(NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
