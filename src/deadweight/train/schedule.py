"""The learning rate, step by step."""

from __future__ import annotations

import math

from deadweight.train.settings import Train


def learning_rate(train: Train, step: int) -> float:
    """Linear warm-up, then a cosine down to the final share, or (wsd) a plateau and a linear decay at the end."""
    low = train.final_share
    if train.schedule == "cosine":
        return train.learning_rate * warm_cosine(step, train.steps, train.warmup, low)
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    decaying = max(1, round(train.decay_share * train.steps))
    done = max(0.0, (step - (train.steps - decaying)) / decaying)
    return train.learning_rate * (1 - (1 - low) * min(done, 1.0))


def warm_cosine(step: int, steps: int, warmup: int, final_share: float = 0.0) -> float:
    """The factor of the peak learning rate: a linear warm-up, then half a cosine from 1 down to the final share."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(1, steps - warmup), 1.0)
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * done))
