"""A claim: a law, the motion of parameters it speaks of, and its proof. The audit turns claims into findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deadweight.claims.point import Motion, Point, Values
from deadweight.proof.steps import Step
from deadweight.proof.verdict import Tier, Verdict


class Title(NamedTuple):
    """How a law is called: by its code, DW002, and by its name, key-bias."""

    code: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """`node` is the parameter that becomes redundant; `index` along `axis` names the part that is meant (None: all)."""

    law: Title
    node: str
    dof: int
    verdict: Verdict
    tier: Tier = "real"
    into: tuple[str, ...] = ()
    index: Tensor | None = None
    axis: int = 0
    steps: tuple[Step, ...] = ()
    note: str = ""
    epsilon: float = field(default=0.0)  # the ε that an "epsilon" claim takes for 0
    whole: bool = False  # every single element of `node` is redundant: later searches leave the parameter out

    @property
    def code(self) -> str:
        return self.law.code

    @property
    def name(self) -> str:
        return self.law.name

    @abstractmethod
    def motions(self, point: Point) -> Iterator[Motion]:
        """A spanning set of the directions that the claim calls redundant, at this point."""

    @abstractmethod
    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        """One random direction of that span."""

    @abstractmethod
    def member(self, point: Point, generator: torch.Generator) -> Values:
        """The parameters that move, after a random motion of finite size along which nothing may change."""


def noted(claim: Claim, note: str) -> str:
    """A note with the conditions that the claim has already."""
    return "; ".join(filter(None, (claim.note, note)))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
