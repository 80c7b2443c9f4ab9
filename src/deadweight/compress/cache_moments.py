"""The measurements of a cache: means and second moments of keys and values, and of the gradients with respect to them.

Keys are measured before RoPE. Heads are grouped into sets, as they are coded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall
from deadweight.compress.locate import Heads
from deadweight.compress.measure import Pair, Recorder, is_finite, second
from deadweight.compress.rotary_layout import rotate
from deadweight.compress.uncoded_tokens import UNCODED_TOKENS
from deadweight.errors import DeadweightError
from deadweight.slim.attention import side_by_side

SEEN = 10  # a covariance is shrunk by 1 / (SEEN · tokens per dimension), at most by a half


@dataclass(frozen=True)
class SetMoments:
    """The measurements of one set of key heads: its pre-RoPE keys and its values, as one vector."""

    keys: int  # numbers of the vector that are keys; the others are values
    mean: Tensor  # (m,)
    covariance: Tensor  # (m, m)
    gradient: Tensor  # (m, m): second moment of the gradient of the loss


@dataclass(frozen=True)
class MeasuredCache:
    """The measurements of one attention, for every set of its key heads."""

    heads: Heads
    rates: Tensor | None  # radians per position of its rotary pairs
    sets: tuple[SetMoments, ...]


@dataclass
class CacheMoments:
    """Sums over the tokens of one attention, for every set of key heads."""

    heads: Heads
    rates: Tensor | None  # radians per position of its rotary pairs
    sets: int
    mean: Tensor  # (sets, m)
    states: Tensor  # (sets, m, m)
    gradient: Tensor  # (sets, m, m)
    tokens: int = 0
    graded: int = 0

    @classmethod
    def empty(cls, heads: Heads, rates: Tensor | None, sets: int) -> CacheMoments:
        m = heads.key_heads // sets * (heads.d_qk + heads.d_v)
        mean, states, gradient = (torch.zeros(sets, *shape, dtype=torch.float64) for shape in ((m,), (m, m), (m, m)))
        return cls(heads, rates, sets, mean, states, gradient)

    def vectors(self, key: Tensor, value: Tensor) -> Tensor:
        """Pre-RoPE keys and values of every set, or gradients with respect to them: (b, sets, t, m)."""
        self.check(key, value)
        together = self.heads.key_heads // self.sets
        keys = side_by_side(self.unrotate(key.detach().float())[:, :, UNCODED_TOKENS:], together)
        return torch.cat([keys, side_by_side(value.detach().float()[:, :, UNCODED_TOKENS:], together)], -1)

    def unrotate(self, keys: Tensor) -> Tensor:
        """Undo RoPE in keys, or in gradients with respect to them, (b, g, t, d)."""
        if self.rates is None:
            return keys
        positions = torch.arange(keys.shape[2], dtype=torch.float64)[:, None]
        return rotate(keys, (-positions * self.rates).to(keys.device, torch.float32), self.heads.rotary_pairs)

    def add(self, key: Tensor, value: Tensor) -> None:
        vectors = self.vectors(key, value)
        self.tokens += vectors.shape[0] * vectors.shape[2]
        self.mean += vectors.sum((0, 2)).double().cpu()
        self.states += second(vectors)

    def grade(self, recorded: Pair, gradients: Pair) -> None:
        """Add gradients with respect to keys and values."""
        vectors = self.vectors(*gradients)
        self.graded += vectors.shape[0] * vectors.shape[2]
        self.gradient += second(vectors)

    def check(self, *tensors: Tensor) -> None:
        if not all(map(is_finite, tensors)):
            raise DeadweightError(
                f"{self.heads.path} has keys, values or gradients that are NaN or infinite on the calibration text; "
                "expected finite ones: nothing can be measured on this model"
            )
        if tensors[0].shape[2] <= UNCODED_TOKENS:
            raise DeadweightError(
                f"found calibration windows of {tensors[0].shape[2]} tokens; expected more than {UNCODED_TOKENS}, the "
                "first tokens that are not coded"
            )

    def measured(self) -> MeasuredCache:
        """Means, covariances and second moments of gradients."""
        if self.tokens == 0 or self.graded == 0:
            raise DeadweightError(f"{self.heads.path} was not reached by the calibration text; expected it to be used")
        mean = self.mean / self.tokens
        covariance = shrink_covariance(self.states / self.tokens - mean[:, :, None] * mean[:, None, :], self.tokens)
        keys = self.heads.key_heads // self.sets * self.heads.d_qk
        each = zip(mean, covariance, self.gradient / self.graded, strict=True)
        return MeasuredCache(self.heads, self.rates, tuple(SetMoments(keys, *moments) for moments in each))


def shrink_covariance(covariance: Tensor, tokens: int) -> Tensor:
    """Shrink a covariance towards a multiple of the identity; the fewer tokens were measured, the more.

    A direction without variance in calibration must not be dropped: other text may use it.
    """
    size = covariance.shape[-1]
    share = min(0.5, size / (SEEN * tokens))
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return (1 - share) * covariance + share * mean * torch.eye(size, dtype=covariance.dtype)


class CacheRecorder(Recorder[CacheMoments]):
    """Records keys and values."""

    knows_sinks = True  # weights that do not add up to 1 change nothing about keys and values

    def record(self, call: AttentionCall, moments: CacheMoments) -> Tensor:
        key, value = self.with_gradient(call.key), self.with_gradient(call.value)
        moments.add(key, value)
        self.keep(call.path, key, value)
        return call.attend(call.query, key, value)
