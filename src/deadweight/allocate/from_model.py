"""The lag profile of a trained model: how much attention its early layers pay to the token m back.

Every call of scaled_dot_product_attention is watched while the model reads short windows, so this works for any model
that transformers or this package runs; the weights are formed again from queries and keys, a few windows at a time,
and only their means by lag are kept. A query at place t predicts token t + 1, so lag m is the key at place t − m + 1.
Queries see all lags, and the first key of a window is none of them: models park attention there that they have no use
for.

Attention says where a layer looks, not what it makes of it, and lag 1 is what the skip connection carries anyway: a
profile of the text itself (`from_text`) is about the task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deadweight.allocate.from_text import effective_tokens
from deadweight.allocate.profile import Profile
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.kinds import Arguments, Keywords, Leaf
from deadweight.source.text import printable

WINDOWS, AT_A_TIME = 32, 4
QUERIES = 64  # per window, if the context allows


def measure_model(
    model: str, lags: int, *, text: str = "embedded", layers: int | None = None, say: Progress = silent
) -> Profile:
    """Mean attention by lag over the first `layers` layers (a third of them by default) on a text."""
    from deadweight.evaluate.run import Subject
    from deadweight.source.plain_text import check_text, read_text

    subject = Subject.open(model, {}, say)
    if lags >= subject.context:
        raise DeadweightError(
            f"found {lags} lags; {printable(model)} reads {subject.context} tokens, expected at most "
            f"{subject.context - 1} lags"
        )
    read = read_text(text, say)
    check_text(read, text)
    ids = torch.tensor(subject.encode(read[: 64 * WINDOWS * (lags + QUERIES)]))
    masses = attention_by_lag(subject.module, windows(ids, min(lags + QUERIES, subject.context), text), lags, say)
    n = layers or max(1, len(masses) // 3)
    if n > len(masses):
        raise DeadweightError(f"found layers = {n}; {printable(model)} has {len(masses)}")
    told = f"attention of the first {n} of {len(masses)} layers of {printable(model)}"
    return Profile(tuple(masses[:n].mean(0).tolist()), told, effective_tokens(ids.numpy()))


def windows(ids: Tensor, length: int, name: str) -> Tensor:
    count = min(WINDOWS, len(ids) // length)
    if count == 0:
        raise DeadweightError(f"{printable(name)} gives {len(ids):,} tokens; expected {length:,} or more")
    return ids[: count * length].view(count, length)


@torch.no_grad()
def attention_by_lag(module: nn.Module, ids: Tensor, lags: int, say: Progress = silent) -> Tensor:
    """[layer, m − 1]: the mean weight of the token m back."""
    device = next(module.parameters()).device
    totals, parts = [], ids.split(AT_A_TIME)
    for number, part in enumerate(parts):
        say(f"reading: {number / len(parts):.0%}")
        with Watch(lambda q, k, options: by_lag(weights(q, k, **options), lags)) as watch:
            module(part.to(device), use_cache=False)
        if not watch.seen:
            raise DeadweightError(
                f"{type(module).__name__} calls no scaled_dot_product_attention; expected a model that does (in "
                "transformers: attn_implementation='sdpa')"
            )
        totals.append(torch.stack(watch.seen) * len(part))
    return torch.stack(totals).sum(0) / len(ids)


@dataclass
class Watch(TorchFunctionMode):
    """What `look` makes of the queries and keys of every attention, in the order of the layers."""

    look: Callable[[Tensor, Tensor, Keywords], Tensor]
    seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Leaf], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            options = {name: given.get(name) for name in ("attn_mask", "is_causal", "scale")}
            self.seen.append(self.look(given["query"], given["key"], options))
        return func(*args, **(kwargs or {}))


def weights(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool | None, scale: float | None) -> Tensor:
    """softmax(scale · QKᵀ + mask), in float32: batch × heads × queries × keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


def by_lag(attention: Tensor, lags: int) -> Tensor:
    """The mean over windows, heads and the queries that see all lags."""
    means = attention.mean((0, 1))
    return torch.stack([means.diagonal(1 - m)[lags - m + 1 :].mean() for m in range(1, lags + 1)]).cpu()
