"""What coding a cache did, and what it costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from deadweight.compress.result import Judgement
from deadweight.notebook import Shown
from deadweight.slim.format import CacheSpec
from deadweight.version import __version__


@dataclass(frozen=True)
class CurvePoint:
    """A share of the cache, and what it costs on every text that was judged by."""

    share: float
    predicted: float
    judgements: dict[str, Judgement]


@dataclass(frozen=True)
class CacheCompression(Shown):
    """One model with a coded cache, or the curve of what such caches would cost."""

    model: str
    asked: float | None  # the share of a 16-bit cache; None if the largest loss was given
    tokens: int  # length of a sequence that shares are about
    calibration_tokens: int
    points: tuple[CurvePoint, ...]  # one, or those of a curve
    caches: dict[str, CacheSpec]  # of the last point, by attention
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
        """Of a 16-bit cache, and of the coded one, without the first tokens."""
        specs = self.caches.values()
        return sum(s.bytes_before(1) for s in specs), sum(s.row_bytes for s in specs)


def perplexity_rise(judgement: Judgement) -> float:
    return math.expm1(judgement.increase)


def cache_data(result: CacheCompression) -> dict[str, Any]:
    """Everything as plain data, for deadweight.json and --json."""
    before, after = result.bytes_per_token
    return {
        "deadweight": __version__,
        "source": result.model,
        "cache": "coded",
        "budget": {"asked": result.asked, "share": result.point.share, "tokens": result.tokens},
        "bytes_per_token": {"before": before, "after": after},
        "calibration_tokens": result.calibration_tokens,
        "points": [point_data(point) for point in result.points],
        "before_healing": None if result.before_healing is None else point_data(result.before_healing),
        "healed_steps": result.healed,
        "caches": {path: asdict(spec) for path, spec in result.caches.items()},
        "seconds": round(result.seconds, 2),
        "seconds_of_a_forward_pass": round(result.seconds_forward, 2),
        "notes": list(result.notes),
    }


def point_data(point: CurvePoint) -> dict[str, Any]:
    texts = {
        name: {
            "tokens": j.tokens,
            "kl": j.error,
            "loss_before": j.loss_before,
            "loss_after": j.loss_after,
            "perplexity_rise": perplexity_rise(j),
        }
        for name, j in point.judgements.items()
    }
    return {"share": point.share, "predicted": point.predicted, "texts": texts}


def outcome_line(name: str, judgement: Judgement) -> str:
    """What it costs on one text."""
    before = math.exp(min(judgement.loss_before or 0.0, 700.0))
    after = math.exp(min(judgement.loss_after or 0.0, 700.0))
    return (
        f"{name}: perplexity {before:,.2f} → {after:,.2f} ({perplexity_rise(judgement):+.2%}), "
        f"KL {judgement.error:.2e} nats per token, {judgement.tokens:,} tokens"
    )


def cache_card(result: CacheCompression, loading: str) -> str:
    """A README.md for the folder."""
    before, after = result.bytes_per_token
    lines = [
        "---",
        "tags: [deadweight]",
        "---",
        f"# {result.model.rstrip('/').rpartition('/')[2]}, with a coded key-value cache",
        "",
        f"Made by deadweight {__version__}: {after:,} bytes of cache per token in place of {before:,}; at "
        f"{result.tokens:,} tokens {result.point.share:.1%} of a 16-bit cache, everything included. The weights are "
        "those of the original. This is not the same function; what it costs was measured:",
        "",
        *(f"- {outcome_line(name, j)}" for name, j in result.point.judgements.items()),
        "",
        "## Loading",
        "```python",
        loading,
        "```",
        "",
        "Without this code, plain transformers loads the original model with its usual cache.",
        "",
        "Which coordinate of which layer has how many bits: `deadweight.json`.",
    ]
    return "\n".join(lines) + "\n"
