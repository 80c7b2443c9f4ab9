"""Masked tokens for training an encoder: which tokens it must predict from all others.

A masked token carries its own id plus the size of the vocabulary, so that one tensor says what is read and what is
predicted. The last id of the vocabulary is the mask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HIDDEN = 0.15  # of the tokens of a window, as in BERT
STREAM = 1  # keeps the draws apart from those of the windows, which have the same seed and step


def hide_tokens(windows: Tensor, vocabulary: int, seed: int, step: int) -> Tensor:
    """Windows without their last token, in each of which the same number of tokens is masked. Which ones depends only
    on the seed and the step."""
    tokens = windows[:, :-1]
    order = np.random.default_rng((seed, step, STREAM)).random(tokens.shape).argsort(1)
    masked = torch.from_numpy(order < max(1, round(HIDDEN * tokens.shape[1])))
    return torch.where(masked, tokens + vocabulary, tokens)


def split_hidden(tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """What the model reads, and what it must predict: −100, which the loss ignores, where nothing is masked."""
    masked = tokens >= vocabulary
    return torch.where(masked, vocabulary - 1, tokens), torch.where(masked, tokens - vocabulary, -100)
