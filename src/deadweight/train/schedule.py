"""The learning rate, step by step."""

from __future__ import annotations

import math

from deadweight.train.settings import Train


def learning_rate(train: Train, step: int) -> float:
    """Linear warm-up, then a cosine to the final share, or (wsd) a plateau and a linear fall at the end."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    low = train.final_share
    if train.schedule == "cosine":
        gone = (step - train.warmup) / max(1, train.steps - train.warmup)
        return train.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(gone, 1.0))))
    falling = max(1, round(train.decay_share * train.steps))
    gone = max(0.0, (step - (train.steps - falling)) / falling)
    return train.learning_rate * (1 - (1 - low) * min(gone, 1.0))
