"""The result of coding a cache: bits, sizes and loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from deadweight.compress.result import Judgement
from deadweight.notebook import Shown
from deadweight.slim.format import CacheSpec


@dataclass(frozen=True)
class CurvePoint:
    """A size of the cache, and its loss on every held-out text."""

    share: float
    predicted: float
    judgements: dict[str, Judgement]


@dataclass(frozen=True)
class CacheCompression(Shown):
    """A model with a coded cache, or the curve of loss against cache size."""

    model: str
    asked: float | None  # the share of a 16-bit cache; None if the largest loss was given
    tokens: int  # length of a sequence that shares are about
    calibration_tokens: int
    points: tuple[CurvePoint, ...]  # one, or those of a curve
    caches: dict[str, CacheSpec]  # of the last point, by attention
    beside: tuple[CurvePoint, ...] = ()  # other sizes: tried on the way to the chosen one, or only predicted
    notes: tuple[str, ...] = ()
    healed: int = 0
    before_healing: CurvePoint | None = None
    seconds: float = 0.0
    seconds_forward: float = 0.0  # of plain forward passes over the calibration text
    module: nn.Module | None = None

    @property
    def point(self) -> CurvePoint:
        return self.points[-1]

    @property
    def bits(self) -> float:
        """Bits per number, everything included."""
        return 16 * self.point.share

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Bytes per token of a 16-bit cache and of the coded one, without the uncoded tokens."""
        specs = self.caches.values()
        return sum(s.bytes_before(1) for s in specs), sum(s.token_bytes for s in specs)


def perplexity_rise(judgement: Judgement) -> float:
    return math.expm1(judgement.increase)


def outcome_line(name: str, judgement: Judgement) -> str:
    """The loss on one text, in one line."""
    before = math.exp(min(judgement.loss_before or 0.0, 700.0))
    after = math.exp(min(judgement.loss_after or 0.0, 700.0))
    return (
        f"{name}: perplexity {before:,.2f} → {after:,.2f} ({perplexity_rise(judgement):+.2%}), "
        f"KL {judgement.error:.2e} nats per token, {judgement.tokens:,} tokens"
    )
