"""Second moments of what passes through every head, and of the gradient with respect to it.

Let z be a vector that a head passes on and ∂z the gradient of the loss with respect to it. Replacing z by z + δ changes
the loss, to second order and with labels drawn from the model's own predictions (so that the first order vanishes and
the loss is the KL divergence from the original), by ½ E(∂z·δ)². With δ linear in z, the moments below are all that is
needed to predict any truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.compress.attention_calls import AttentionCall, observing
from deadweight.compress.judge import AT_A_TIME, main_output, run_model
from deadweight.compress.locate import Heads
from deadweight.compress.streaming import NotAloneError, run_again
from deadweight.errors import DeadweightError


def second(x: Tensor) -> Tensor:
    """Σ x xᵀ over rows and tokens for every head, in float64: (b, h, t, d) → (h, d, d)."""
    flat = x.transpose(0, 1).flatten(1, 2)
    return (flat.transpose(1, 2) @ flat).double().cpu()


def is_finite(x: Tensor) -> bool:
    """Whether there is no NaN or infinity. The sum is checked first: that takes half the time, unless it overflows."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


GRADED = 4096  # tokens: from here on gradients are taken for a third of the batches


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

    def grade(self, query: Tensor, dq: Tensor, dout: Tensor) -> None:
        """Add gradients with respect to queries and to the outputs of the heads."""
        query, dq, dout = query.detach().float(), dq.float(), dout.float()
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


@dataclass
class Recorder:
    """Adds up the inputs and outputs of every attention over one forward pass.

    For gradients, this happens when a block is recomputed in the backward pass. If blocks cannot be recomputed, inputs
    and outputs of all of them are kept until the backward pass.
    """

    known: dict[str, HeadMoments]
    gradients: bool = False
    whole: bool = False
    again: bool = False  # a block runs again
    kept: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        moments = self.known.get(path)
        if moments is None:  # the examples that located heads did not reach it: it stays as it is
            return call.attend(query, key, value)
        if self.gradients and not self.whole and not self.again:
            if torch.is_grad_enabled():
                raise NotAloneError(f"{path}, which is not called by its block")
            return call.attend(query, key, value)
        if self.gradients and not query.requires_grad:
            query = query.detach().requires_grad_()
        out = call.attend(query, key, value)
        moments.add(query, out)
        if self.gradients:
            self.kept.append((path, query, out))
        return out

    def answer(self, outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Add gradients of the recorded tensors to the moments; return those with respect to the block's inputs."""
        kept, self.kept = self.kept, []
        asked = [*inputs, *(t for _, query, out in kept for t in (query, out))]
        gradients = torch.autograd.grad(outputs, asked, given, allow_unused=True) if outputs else (None,) * len(asked)
        for n, (path, query, out) in enumerate(kept):
            pair = gradients[len(inputs) + 2 * n : len(inputs) + 2 * n + 2]
            dq, dout = (torch.zeros_like(x) if g is None else g for x, g in zip((query, out), pair, strict=True))
            self.known[path].grade(query, dq, dout)
        return list(gradients[: len(inputs)])


def measure(
    model: Any,
    moments: dict[str, Any],
    batches: Sequence[dict[str, Tensor]],
    *,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
    recorder: Any = Recorder,
    most: int = 3,
) -> dict[str, Any]:
    """The sums of every attention over all batches, by its path; `moments` holds empty ones, and is returned.

    If there are many tokens, gradients are taken for one batch in `most`.
    """
    generator = torch.Generator().manual_seed(seed)
    every = max(1, min(most, sum(next(iter(b.values())).numel() for b in batches) // GRADED))
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        whole = False
        for number, batch in enumerate(batches):
            if number % every == 0:
                whole = add_graded(model, moments, batch, generator, recorder, whole)
            else:
                plain = recorder(moments)
                with observing(model, plain), torch.no_grad():
                    run_model(model, batch, words=False)
            tick(number + 1)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return moments


def add_graded(
    model: Any, moments: dict[str, Any], batch: dict[str, Tensor], generator: torch.Generator, make: Any, whole: bool
) -> bool:
    """One batch with gradients: block by block, or with the graph of the whole model if it must be. Returns which."""
    recorder = make(moments, gradients=True, whole=whole)
    try:
        with ExitStack() as stack:
            stack.enter_context(observing(model, recorder))
            go_back = None if whole else stack.enter_context(run_again(model, list(moments), recorder))
            with torch.enable_grad():
                output = run_model(model, batch)
            loss = probe(output, generator)
            if go_back is None:
                recorder.answer([loss], [torch.ones_like(loss)], [])
            else:
                go_back(loss)
    except NotAloneError:
        return add_graded(model, moments, batch, generator, make, True)
    return whole


def probe(output: Any, generator: torch.Generator) -> Tensor:
    """A scalar whose gradients have the second moment of the KL divergence from the original.

    For logits: minus the log-probability of labels drawn from them. For other outputs: a random projection, scaled so
    that the squared gradient is the relative squared error.
    """
    result, is_logits = main_output(output)
    if is_logits:
        flat = result.flatten(0, -2).float()
        if not is_finite(flat.detach()):
            raise DeadweightError(
                "the model gives logits that are not finite on the calibration inputs; expected a model that works"
            )
        return F.cross_entropy(flat, drawn(flat.detach(), generator), reduction="sum")
    states = result.float()
    scale = states.detach().pow(2).sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    noise = torch.randn(states.shape, generator=generator).to(states.device)
    return (states * noise / scale).sum()


def drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one label per row from its probabilities, (rows, words) → (rows), by inverting the cumulative sum.

    In float64: in float32, rare words would vanish in a sum near 1.
    """
    labels = []
    for rows in logits.split(AT_A_TIME):
        sums = rows.softmax(-1).cumsum(-1, dtype=torch.float64)
        at = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64).to(sums.device) * sums[:, -1:]
        labels.append(torch.searchsorted(sums, at, right=True).squeeze(1))
    return torch.cat(labels).clamp(max=logits.shape[-1] - 1)
