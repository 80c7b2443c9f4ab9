"""The lag profile of a trained model: how much attention its early layers pay to the token m back.

Every call of scaled_dot_product_attention is observed while the model reads short windows, so this works for any model
that transformers or this package runs. The attention weights are computed again from queries and keys, a few windows
at a time, and only their means by lag are kept. A query at position t predicts token t + 1, so lag m is the key at
position t − m + 1. Only queries that see all lags count. The first key of a window is no lag: models use it as an
attention sink.

Attention shows where a layer looks, not what it does with it, and the skip connection carries lag 1 anyway. A profile
of the text itself (`from_text`) describes the task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deadweight.allocate.profile import Profile
from deadweight.allocate.profile_from_text import effective_tokens
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.printable import printable
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

WINDOWS, AT_A_TIME = 32, 4
QUERIES = 64  # per window, if the context allows


def measure_model(
    model: str, lags: int, *, text: str = "embedded", layers: int | None = None, progress: Progress = silent
) -> Profile:
    """Mean attention by lag over the first `layers` layers (a third of them by default) on a text."""
    from deadweight.evaluate.run import EvaluatedModel
    from deadweight.source.plain_text import check_text, read_text

    subject = EvaluatedModel.open(model, {}, progress)
    if lags >= subject.context:
        raise DeadweightError(
            f"found {lags} lags; {printable(model)} reads {subject.context} tokens, expected at most "
            f"{subject.context - 1} lags"
        )
    read = read_text(text, progress)
    check_text(read, text)
    ids = torch.tensor(subject.encode(read[: 64 * WINDOWS * (lags + QUERIES)]))
    masses = attention_by_lag(subject.module, windows(ids, min(lags + QUERIES, subject.context), text), lags, progress)
    n = layers or max(1, len(masses) // 3)
    if n > len(masses):
        raise DeadweightError(f"found layers = {n}; {printable(model)} has {len(masses)}")
    source = f"attention of the first {n} of {len(masses)} layers of {printable(model)}"
    return Profile(tuple(masses[:n].mean(0).tolist()), source, effective_tokens(ids.numpy()))


def windows(ids: Tensor, length: int, name: str) -> Tensor:
    count = min(WINDOWS, len(ids) // length)
    if count == 0:
        raise DeadweightError(f"{printable(name)} gives {len(ids):,} tokens; expected {length:,} or more")
    return ids[: count * length].view(count, length)


@torch.no_grad()
def attention_by_lag(module: nn.Module, ids: Tensor, lags: int, progress: Progress = silent) -> Tensor:
    """[layer, m − 1]: the mean weight of the token m back."""
    device = next(module.parameters()).device
    totals, parts = [], ids.split(AT_A_TIME)
    for number, part in enumerate(parts):
        progress(f"reading: {number / len(parts):.0%}")
        with AttentionWatch(lags) as watch:
            module(part.to(device), use_cache=False)
        if not watch.means:
            raise DeadweightError(
                f"{type(module).__name__} calls no scaled_dot_product_attention; expected a model that does (in "
                "transformers: attn_implementation='sdpa')"
            )
        totals.append(torch.stack(watch.means) * len(part))
    return torch.stack(totals).sum(0) / len(ids)


@dataclass
class AttentionWatch(TorchFunctionMode):
    """The mean attention by lag of every call of scaled_dot_product_attention, in the order of the layers."""

    lags: int
    means: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Leaf], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        if func is F.scaled_dot_product_attention:
            self.means.append(by_lag(SdpaCall(*args, **(kwargs or {})).weights(), self.lags))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class SdpaCall:
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def weights(self) -> Tensor:
        """softmax(scale · QKᵀ + mask), in float32: batch × heads × queries × keys."""
        q, k, mask = self.query, self.key, self.attn_mask
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1)


def by_lag(attention: Tensor, lags: int) -> Tensor:
    """The mean over windows, heads and the queries that see all lags."""
    means = attention.mean((0, 1))
    return torch.stack([means.diagonal(1 - m)[lags - m + 1 :].mean() for m in range(1, lags + 1)]).cpu()
