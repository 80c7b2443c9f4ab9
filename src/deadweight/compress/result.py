"""The result of a compression: what was kept, and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from deadweight.compress.truncate import KeptDimensions
from deadweight.notebook import Shown
from deadweight.slim.format import SlimSpec


@dataclass(frozen=True)
class Judgement:
    """Original and compressed model side by side on held-out inputs."""

    tokens: int
    error: float  # KL divergence in nats per token, or the relative squared error of hidden states
    what: Literal["kl", "relative squared error"]
    loss_before: float | None = None  # nats per token, where the next token is predicted
    loss_after: float | None = None
    cosine: float | None = None  # between hidden states, where there are no logits

    @property
    def increase(self) -> float:
        """The increase of the loss; for models without a loss, the error."""
        if self.loss_before is None or self.loss_after is None:
            return self.error
        return self.loss_after - self.loss_before


@dataclass(frozen=True)
class Compression(Shown):
    """One model with smaller heads."""

    model: str
    layout: str
    share: float  # of the attention weights that is kept
    kept: dict[str, KeptDimensions]  # by attention
    head_sizes: dict[str, tuple[int, int]]  # of the original, by attention: of a key head and of a value head
    kv_before: int  # keys and values per token
    kv_after: int
    parameters_before: int
    parameters_after: int
    predicted: float
    judgement: Judgement
    tokens: int  # calibrated on
    notes: tuple[str, ...] = ()
    left_alone: dict[str, str] = field(default_factory=dict)  # attentions that could not be cut everywhere, and why
    module: nn.Module | None = None
    slim: SlimSpec | None = None  # how the module is built, if it is slim
    asked: float | None = None  # the share that was asked for, if one was
    judgement_before_healing: Judgement | None = None
    healed: int = 0  # steps, of what was kept
    seconds: float = 0.0
    seconds_forward: float = 0.0  # what plain forward passes over the calibration inputs take


def outcome(judgement: Judgement) -> str:
    """The loss, in one line."""
    if judgement.loss_before is not None and judgement.loss_after is not None:
        before, after = (math.exp(min(x, 700.0)) for x in (judgement.loss_before, judgement.loss_after))
        return (
            f"perplexity {before:,.2f} → {after:,.2f} ({after / before - 1:+.2%}), KL {judgement.error:.2e} nats per "
            f"token on {judgement.tokens:,} tokens held back"
        )
    if judgement.cosine is not None:
        return (
            f"cosine to the original {judgement.cosine:.4f}, relative squared error {judgement.error:.2e}, "
            f"on {judgement.tokens:,} tokens held back"
        )
    return f"KL {judgement.error:.2e} nats per output, on {judgement.tokens:,} held back"
