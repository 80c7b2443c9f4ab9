"""Second moments of what passes through every head, and of the gradient with respect to it.

Let z be a vector that a head passes on and ∂z the gradient of the loss with respect to it. Replacing z by z + δ changes
the loss, to second order and with labels drawn from the model's own predictions (so that the first order vanishes and
the loss is the KL divergence from the original), by ½ E(∂z·δ)². With δ linear in z, the moments below are all that is
needed to predict any truncation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall
from deadweight.compress.locate import Heads
from deadweight.compress.measure import Pair, Recorder, is_finite, second
from deadweight.errors import DeadweightError


@dataclass
class HeadMoments:
    """Sums over the tokens of one attention. Sums with gradients are over fewer tokens."""

    heads: Heads
    out: Tensor  # (h, d_v, d_v): of the output of a query head
    out_mean: Tensor  # (h, d_v)
    out_gradient: Tensor  # (h, d_v, d_v)
    query: Tensor  # (h, s, s): of the non-rotary dimensions of queries
    query_gradient: Tensor  # (h, s, s)
    pairs: Tensor  # (g, groups·2·P, groups·2·P): of the derivatives by stretching and turning each rotary pair
    tokens: int = 0
    graded: int = 0

    @classmethod
    def empty(cls, heads: Heads) -> HeadMoments:
        h, v, s = heads.heads, heads.d_v, len(heads.non_rotary)
        derivatives = heads.groups * 2 * len(heads.rotary_pairs)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return cls(
            heads,
            out=zeros(h, v, v),
            out_mean=zeros(h, v),
            out_gradient=zeros(h, v, v),
            query=zeros(h, s, s),
            query_gradient=zeros(h, s, s),
            pairs=zeros(heads.key_heads, derivatives, derivatives),
        )

    def add(self, query: Tensor, out: Tensor) -> None:
        """Add queries, and the outputs of the heads."""
        query, out = query.detach().float(), out.detach().float()
        self.check(query, out)
        self.tokens += out.shape[0] * out.shape[2]
        self.out += second(out)
        self.out_mean += out.sum((0, 2)).double().cpu()
        self.query += second(query[..., list(self.heads.non_rotary)])

    def grade(self, recorded: Pair, gradients: Pair) -> None:
        """Add gradients with respect to queries and to the outputs of the heads."""
        query, dq, dout = recorded[0].detach().float(), gradients[0].float(), gradients[1].float()
        self.check(dq, dout)
        self.graded += dout.shape[0] * dout.shape[2]
        self.out_gradient += second(dout)
        self.query_gradient += second(dq[..., list(self.heads.non_rotary)])
        if self.heads.rotary_pairs:
            self.pairs += second(pair_derivatives(query, dq, self.heads))

    def check(self, *tensors: Tensor) -> None:
        if not all(map(is_finite, tensors)):
            raise DeadweightError(
                f"{self.heads.path} has activations or gradients that are not finite on the calibration inputs; "
                "expected a model that works: nothing can be measured on this one"
            )

    def mean(self) -> HeadMoments:
        """Averages over tokens."""
        if self.tokens == 0 or self.graded == 0:
            raise DeadweightError(
                f"{self.heads.path} was not reached by the calibration inputs; expected all heads to be used"
            )
        return replace(
            self,
            out=self.out / self.tokens,
            out_mean=self.out_mean / self.tokens,
            query=self.query / self.tokens,
            out_gradient=self.out_gradient / self.graded,
            query_gradient=self.query_gradient / self.graded,
            pairs=self.pairs / self.graded,
        )


def pair_derivatives(query: Tensor, gradient: Tensor, heads: Heads) -> Tensor:
    """Derivatives of the loss by stretching and by turning each rotary pair of each query head, for every token.

    Stretching pair (i, j) by 1 + a and turning it by the angle b changes q by a·q + b·Jq. The result is
    (b, g, t, groups·2·P).
    """
    i, j = (torch.tensor(side, device=query.device) for side in zip(*heads.rotary_pairs, strict=True))
    stretch = query[..., i] * gradient[..., i] + query[..., j] * gradient[..., j]
    turn = query[..., i] * gradient[..., j] - query[..., j] * gradient[..., i]
    both = torch.cat([stretch, turn], -1)  # b h t 2P
    return both.unflatten(1, (heads.key_heads, heads.groups)).transpose(2, 3).flatten(3)


class HeadRecorder(Recorder[HeadMoments]):
    """Records queries and the outputs of the heads."""

    def record(self, call: AttentionCall, moments: HeadMoments) -> Tensor:
        query = self.with_gradient(call.query)
        out = call.attend(query, call.key, call.value)
        moments.add(query, out)
        self.keep(call.path, query, out)
        return out
