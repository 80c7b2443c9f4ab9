"""Facts about a parameter after a rewrite: what they say need not be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Index = tuple[int, ...]
Because = Literal["dead", "folded", "centred", "lost"]  # no effect; moved elsewhere; mean removed; lost direction


@dataclass(frozen=True)
class Constant:
    """Every element has this value: 0 for a bias, 1 for a gain (0 where the model stores the gain minus one)."""

    parameter: str
    value: float
    because: Because = "folded"


@dataclass(frozen=True)
class ZeroPlaces:
    """Zero at these indices of an axis; in a matrix, only at these indices of the other axis (None: at all)."""

    parameter: str
    axis: int
    places: Index
    others: Index | None = None
    because: Because = "dead"


@dataclass(frozen=True)
class IdentityBlocks:
    """Each block of rows (indices along `axis`) is the identity matrix in these columns."""

    parameter: str
    axis: int
    blocks: tuple[Index, ...]
    columns: Index
    whole: bool = False  # the matrix is the identity, all of it


@dataclass(frozen=True)
class Passed:
    """A BatchNorm that is left with its shift only; `before` is the layer whose output it reads."""

    module: str
    before: str


Fact = Constant | ZeroPlaces | IdentityBlocks | Passed


def holds(fact: Fact, parameter: Tensor) -> bool:
    """Whether the fact holds exactly for this parameter."""
    if isinstance(fact, Constant):
        return bool((parameter == fact.value).all())
    if isinstance(fact, ZeroPlaces):
        part = parameter.movedim(fact.axis, 0)[list(fact.places)]
        part = part if fact.others is None else part[:, list(fact.others)]
        return not bool((part != 0).any())
    if isinstance(fact, IdentityBlocks):
        rows = parameter.movedim(fact.axis, 0)[:, list(fact.columns)]
        eye = torch.eye(len(fact.columns), dtype=parameter.dtype)
        return all(torch.equal(rows[list(block)], eye) for block in fact.blocks)
    return True


def module_of(parameter: str) -> str:
    """The path of the module that holds a parameter."""
    return parameter.rpartition(".")[0]
