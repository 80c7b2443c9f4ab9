"""The result of a reduction, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from deadweight.notebook import Shown
from deadweight.proof.verdict import Tier
from deadweight.reduce.error_limits import Verification
from deadweight.reduce.plan import Layout, Skipped
from deadweight.rewrite.rewrite import Rewrite


@dataclass(frozen=True)
class AppliedRewrite:
    """One rewrite at one place."""

    code: str
    law: str
    parameter: str
    into: tuple[str, ...]
    saves: int  # numbers that the slim layout does not store; in the stock layout, numbers that are constant now
    tier: Tier


def describe_rewrite(rewrite: Rewrite) -> AppliedRewrite:
    claim = rewrite.claim
    into = tuple(n for n in rewrite.touches if n != rewrite.target)
    return AppliedRewrite(claim.code, claim.name, rewrite.target, into, rewrite.saves, claim.tier)


@dataclass(frozen=True)
class Reduction(Shown):
    """A plan and, if it was applied, its result."""

    model: str
    layout: Layout
    steps: tuple[AppliedRewrite, ...]
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
