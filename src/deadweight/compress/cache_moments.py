"""The measurements of a cache: means and second moments of keys and values, and of the gradients with respect to them.

Keys are measured before RoPE. Heads are grouped into sets, as they are coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall
from deadweight.compress.head_moments import is_finite, second
from deadweight.compress.locate import Heads
from deadweight.compress.rotary_layout import rotate
from deadweight.compress.streaming import NotAloneError
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

    def grade(self, key: Tensor, value: Tensor) -> None:
        """Gradients with respect to keys and values."""
        vectors = self.vectors(key, value)
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


@dataclass
class CacheRecorder:
    """Adds up what every attention caches in a forward pass, and its gradients when a block is recomputed."""

    known: dict[str, CacheMoments]
    gradients: bool = False
    whole: bool = False
    again: bool = False  # a block runs again
    kept: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        moments = self.known.get(path)
        if moments is None:
            return call.attend(query, key, value)
        if self.gradients and not self.whole and not self.again:
            if torch.is_grad_enabled():
                raise NotAloneError(f"{path}, which is not called by its block")
            return call.attend(query, key, value)
        if self.gradients:
            key = key if key.requires_grad else key.detach().requires_grad_()
            value = value if value.requires_grad else value.detach().requires_grad_()
            self.kept.append((path, key, value))
        moments.add(key, value)
        return call.attend(query, key, value)

    def answer(self, outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Add gradients of recorded keys and values to the moments; return those with respect to the block's inputs."""
        kept, self.kept = self.kept, []
        asked = [*inputs, *(t for _, key, value in kept for t in (key, value))]
        grads = torch.autograd.grad(outputs, asked, given, allow_unused=True) if outputs else (None,) * len(asked)
        for n, (path, key, value) in enumerate(kept):
            pair = grads[len(inputs) + 2 * n : len(inputs) + 2 * n + 2]
            self.known[path].grade(
                *(torch.zeros_like(x) if g is None else g for x, g in zip((key, value), pair, strict=True))
            )
        return list(grads[: len(inputs)])
