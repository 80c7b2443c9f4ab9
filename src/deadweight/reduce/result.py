"""What a reduction did, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from deadweight.proof.verdict import Tier
from deadweight.reduce.plan import Layout, Skipped
from deadweight.reduce.verify import Verification
from deadweight.rewrite.rewrite import Rewrite


@dataclass(frozen=True)
class Step:
    """One rewrite at one place."""

    code: str
    law: str
    parameter: str
    into: tuple[str, ...]
    saves: int  # numbers that are not stored any more, in the slim layout; that are constant, in stock
    tier: Tier


def step_of(rewrite: Rewrite) -> Step:
    claim = rewrite.claim
    into = tuple(n for n in rewrite.touches if n != rewrite.target)
    return Step(claim.code, claim.name, rewrite.target, into, rewrite.saves, claim.tier)


@dataclass(frozen=True)
class Reduction:
    """A plan, and, where it was carried out, what came of it."""

    model: str
    layout: Layout
    steps: tuple[Step, ...]
    skipped: tuple[Skipped, ...]
    parameters_before: int
    parameters_after: int
    bytes_before: int = 0
    bytes_after: int = 0
    flops_saved: int = 0  # per token
    verification: Verification | None = None
    out: Path | None = None
    module: nn.Module | None = None  # the reduced model, where it was made in memory
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return Path(self.model).name or self.model

    @property
    def saves(self) -> int:
        return sum(s.saves for s in self.steps)
