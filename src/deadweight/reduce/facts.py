"""What is known of a parameter after a rewrite, and therefore need not be stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Index = tuple[int, ...]
Because = Literal["dead", "folded", "centred", "lost"]  # no effect; moved elsewhere; a common mean; a lost direction


@dataclass(frozen=True)
class Constant:
    """Every element has this value: 0 for a bias, 1 for a gain (0 where the model stores the gain less one)."""

    parameter: str
    value: float
    because: Because = "folded"


@dataclass(frozen=True)
class ZeroPlaces:
    """Zero at these places of an axis; for a matrix only in these rows of the other axis (None: in all)."""

    parameter: str
    axis: int
    places: Index
    others: Index | None = None
    because: Because = "dead"


@dataclass(frozen=True)
class IdentityBlocks:
    """Each block of rows (places along `axis`) is the identity matrix in these columns."""

    parameter: str
    axis: int
    blocks: tuple[Index, ...]
    columns: Index
    whole: bool = False  # the matrix is the identity, all of it


@dataclass(frozen=True)
class Passed:
    """A BatchNorm that only adds its shift now; `before` is the layer whose output it reads."""

    module: str
    before: str


Fact = Constant | ZeroPlaces | IdentityBlocks | Passed


@dataclass(frozen=True)
class Known:
    """What earlier rewrites have settled, and later ones must respect. A value: adding facts makes another."""

    by_parameter: dict[str, tuple[Fact, ...]] = field(default_factory=dict)

    def and_also(self, facts: Iterable[Fact]) -> Known:
        more = dict(self.by_parameter)
        for fact in facts:
            if not isinstance(fact, Passed):
                more[fact.parameter] = (*more.get(fact.parameter, ()), fact)
        return Known(more)

    def is_folded(self, parameter: str) -> bool:
        """Whether a vector has been folded away: nothing may fill it again."""
        return any(isinstance(f, Constant) and f.because == "folded" for f in self.by_parameter.get(parameter, ()))

    def is_identity(self, parameter: str) -> bool:
        return any(isinstance(f, IdentityBlocks) and f.whole for f in self.by_parameter.get(parameter, ()))

    def dead(self, parameter: str, shape: torch.Size) -> Tensor:
        """Which elements have no effect at all, whatever is written there."""
        found = torch.zeros(shape, dtype=torch.bool)
        for fact in self.by_parameter.get(parameter, ()):
            if isinstance(fact, Constant) and fact.because == "dead":
                found[...] = True
            elif isinstance(fact, ZeroPlaces) and fact.because == "dead":
                found.movedim(fact.axis, 0)[list(fact.places)] = True
        return found

    def lost_columns(self, parameter: str) -> list[int]:
        """Input columns of a weight that were emptied."""
        return [p for f in self.zeros((parameter,), "lost") for p in f.places]

    def centred_channel(self, module: str) -> int | None:
        """The output channel that was emptied in a module: its weight and its bias have the same."""
        parameters = [p for p in self.by_parameter if p.rpartition(".")[0] == module]
        return next((f.places[0] for f in self.zeros(parameters, "centred")), None)

    def zeros(self, parameters: Iterable[str], because: Because) -> list[ZeroPlaces]:
        facts = [f for p in parameters for f in self.by_parameter.get(p, ())]
        return [f for f in facts if isinstance(f, ZeroPlaces) and f.because == because]


def holds(fact: Fact, parameter: Tensor) -> bool:
    """Whether the fact is true of this parameter, to the bit."""
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
