"""Measuring: run the model on calibration batches, and add what passes through every attention to sums.

Gradients are those of a loss whose labels are drawn from the model's own predictions. Then the first order of the loss
vanishes, and its second order is the KL divergence from the original.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deadweight.compress.attention_calls import AttentionCall, Watch, observing
from deadweight.compress.judge import AT_A_TIME, main_output, run_model
from deadweight.compress.streaming import NotAloneError, run_again
from deadweight.errors import DeadweightError

GRADED = 4096  # tokens: from here on gradients are taken for a third of the batches
GROUP = 256  # words of the vocabulary among which a label is drawn
Pair = tuple[Tensor, Tensor]


class Moments(Protocol):
    """Sums over the tokens of one attention."""

    def add(self, first: Tensor, second: Tensor, /) -> None:
        """Add a recorded pair of tensors."""

    def grade(self, recorded: Pair, gradients: Pair, /) -> None:
        """Add the gradients with respect to a recorded pair."""


M = TypeVar("M", bound=Moments)


@dataclass
class Recorder(ABC, Generic[M]):
    """Adds a pair of tensors of every attention call to the sums of that attention.

    For gradients, this happens when a block is recomputed in the backward pass. If blocks cannot be recomputed
    (`whole`), the pairs of all of them are kept until the backward pass.
    """

    known: dict[str, M]  # by the path of the attention
    gradients: bool = False
    whole: bool = False
    again: bool = False  # a block is being recomputed
    kept: list[tuple[str, Pair]] = field(default_factory=list)

    @abstractmethod
    def record(self, call: AttentionCall, moments: M) -> Tensor:
        """Add the pair of this call to the sums, `keep` it for gradients, and return the outputs of the heads."""

    def __call__(self, call: AttentionCall) -> Tensor:
        moments = self.known.get(call.path)
        waits = self.gradients and not self.whole and not self.again
        if moments is not None and waits and torch.is_grad_enabled():
            raise NotAloneError(f"{call.path}, which is not called by its block")
        if moments is None or waits:
            return call.attend(call.query, call.key, call.value)
        return self.record(call, moments)

    def keep(self, path: str, first: Tensor, second: Tensor) -> None:
        if self.gradients:
            self.kept.append((path, (first, second)))

    def with_gradient(self, tensor: Tensor) -> Tensor:
        """The tensor, as one that autograd computes a gradient for if gradients are measured."""
        return tensor if tensor.requires_grad or not self.gradients else tensor.detach().requires_grad_()

    def answer(self, outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Add gradients of the kept pairs to the sums; return those with respect to the block's inputs."""
        kept, self.kept = self.kept, []
        asked = [*inputs, *(tensor for _, pair in kept for tensor in pair)]
        gradients = torch.autograd.grad(outputs, asked, given, allow_unused=True) if outputs else (None,) * len(asked)
        for n, (path, pair) in enumerate(kept):
            own = gradients[len(inputs) + 2 * n : len(inputs) + 2 * n + 2]
            first, second = (torch.zeros_like(x) if g is None else g for x, g in zip(pair, own, strict=True))
            self.known[path].grade(pair, (first, second))
        return list(gradients[: len(inputs)])


def second(x: Tensor) -> Tensor:
    """Σ x xᵀ over rows and tokens for every head, in float64: (b, h, t, d) → (h, d, d)."""
    flat = x.transpose(0, 1).flatten(1, 2)
    return (flat.transpose(1, 2) @ flat).double().cpu()


def is_finite(x: Tensor) -> bool:
    """Whether there is no NaN or infinity. The sum is checked first: that takes half the time, unless it overflows."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def measure(
    model: nn.Module,
    make: Callable[..., Recorder[M]],
    moments: dict[str, M],
    batches: Sequence[dict[str, Tensor]],
    *,
    tick: Callable[[int], None] = lambda _: None,
    most: int = 3,
    watch: Watch = observing,
) -> dict[str, M]:
    """Add all batches to the sums of every attention, by its path; `make` is the class of the recorder.

    If there are many tokens, gradients are taken for one batch in `most`. The recorder is called inside `watch`.
    """
    generator = torch.Generator().manual_seed(0)
    every = max(1, min(most, sum(next(iter(b.values())).numel() for b in batches) // GRADED))
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        whole = False
        for number, batch in enumerate(batches):
            if number % every == 0:
                whole = add_graded(model, partial(make, moments), batch, generator, whole, watch)
            else:
                plain = make(moments)
                with watch(model, plain), torch.no_grad():
                    run_model(model, batch, words=False)
            tick(number + 1)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return moments


def add_graded(
    model: nn.Module,
    make: Callable[..., Recorder[M]],
    batch: dict[str, Tensor],
    generator: torch.Generator,
    whole: bool,
    watch: Watch,
) -> bool:
    """One batch with gradients: block by block, or with the graph of the whole model if it must be. Returns which."""
    recorder = make(gradients=True, whole=whole)
    try:
        with ExitStack() as stack:
            stack.enter_context(watch(model, recorder))
            go_back = None if whole else stack.enter_context(run_again(model, list(recorder.known), recorder))
            with torch.enable_grad():
                output = run_model(model, batch)
            loss = probe(output, generator)
            if go_back is None:
                recorder.answer([loss], [torch.ones_like(loss)], [])
            else:
                go_back(loss)
    except NotAloneError:
        return add_graded(model, make, batch, generator, True, watch)
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
        return F.cross_entropy(flat, draw_labels(flat.detach(), generator), reduction="sum")
    states = result.float()
    scale = states.detach().pow(2).sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    noise = torch.randn(states.shape, generator=generator).to(states.device)
    return (states * noise / scale).sum()


def draw_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one label per row from its probabilities, (rows, words) → (rows), by inverting the cumulative sum.

    In float64: in float32, rare words would vanish in a sum near 1. A group of words is drawn first, then a word of it,
    so that most sums need not be kept.
    """
    labels = []
    for rows in logits.split(AT_A_TIME):
        groups = F.pad(rows.softmax(-1), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        sums = groups.sum(-1, dtype=torch.float64).cumsum(-1)
        at = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64).to(sums.device) * sums[:, -1:]
        group = torch.searchsorted(sums, at, right=True).clamp(max=sums.shape[1] - 1)
        left = at - F.pad(sums, (1, 0)).gather(1, group)
        inside = groups[torch.arange(len(rows), device=group.device), group[:, 0]].cumsum(-1, dtype=torch.float64)
        word = torch.searchsorted(inside, left, right=True).clamp(max=GROUP - 1)
        labels.append((group * GROUP + word).squeeze(1))
    return torch.cat(labels).clamp(max=logits.shape[-1] - 1)
