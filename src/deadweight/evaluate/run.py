"""How good and how fast a language model is on a text, and beside another one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.plain_text import boundary, check_text, read_text
from deadweight.source.text import printable
from deadweight.source.tokens import encoded, tokenizer_of

LONGEST = 1024  # tokens in a window, unless asked for more
DECODED = 64  # tokens that are generated to time it


@dataclass(frozen=True)
class Evaluation:
    """One model on one text."""

    model: str
    parameters: int
    tokens: int  # predicted
    bytes: int  # of text they stand for
    loss: float  # nats per token
    tokens_per_second: float  # reading, in windows
    decoded_per_second: float  # writing one token at a time, with the cache
    kv_bytes_per_token: int
    weight_bytes: int
    kl: float | None = None  # nats per token, from the other model to this one
    agreement: float | None = None  # share of tokens for which both think the same one most likely

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / self.bytes


def evaluate(
    model: str | Path,
    text: str,
    *,
    against: str | Path | None = None,
    context: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> tuple[Evaluation, ...]:
    """Loss, speed and cache of a causal language model on a text; with `against`, of both, the other one first.

    `limit` is how many bytes of the text are read. Both models must read the same tokens.
    """
    read = read_text(text, progress)
    check_text(read, text)
    read = read[: boundary(read, limit)] if limit and limit < len(read) else read
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    subjects = [Subject.open(str(m), options, progress) for m in ([against] if against is not None else []) + [model]]
    ids = [s.encode(read) for s in subjects]
    if len(ids) == 2 and ids[0] != ids[1]:
        raise DeadweightError(
            f"{printable(str(against))} and {printable(str(model))} read the text as different tokens; expected two "
            "models with one tokenizer"
        )
    if len(ids[0]) < 2:
        raise DeadweightError(f"{printable(text)} gives {len(ids[0])} tokens; expected two or more")
    length = context or min(LONGEST, *(s.context for s in subjects))
    for s in subjects:
        if length > s.context:
            raise DeadweightError(
                f"found a context of {length:,} tokens; {printable(s.name)} takes at most {s.context:,}"
            )
    return measured(subjects, torch.tensor(ids[0]), len(read), length, batch, progress)


@dataclass
class Subject:
    """A model with its tokens."""

    name: str
    module: Any
    tokenizer: Any
    context: int

    @classmethod
    def open(cls, name: str, options: dict[str, Any], progress: Progress) -> Subject:
        from deadweight import embedded
        from deadweight.save.load import load

        progress(f"loading {name}")
        folder = embedded.path() if name == "demo" else name
        module: Any = load(folder, **{k: v for k, v in options.items() if v is not None})
        if not hasattr(module, "generate") or getattr(module.config, "is_encoder_decoder", False):
            raise DeadweightError(f"{printable(name)} is no causal language model; expected one that predicts tokens")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        known = getattr(module.config, "max_position_embeddings", None)
        return cls(name, module.to(device).eval(), tokenizer_of(str(folder)), known or LONGEST)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def encode(self, text: bytes) -> list[int]:
        return encoded(text, self.tokenizer, self.module.config.vocab_size, self.name)


@torch.no_grad()
def measured(
    subjects: list[Subject], ids: Tensor, size: int, length: int, batch: int, progress: Progress
) -> tuple[Evaluation, ...]:
    """All windows through all models, side by side."""
    whole = (len(ids) - 1) // length
    rows = ids[: whole * length].view(whole, length) if whole else ids[:0].view(0, length)
    goals = ids[1 : whole * length + 1].view(whole, length) if whole else rows
    parts = list(zip(rows.split(batch), goals.split(batch), strict=True)) if whole else []
    if len(ids) - 1 > whole * length:  # what is left at the end
        rest = ids[whole * length :]
        parts.append((rest[None, :-1], rest[None, 1:]))
    losses, seconds = [0.0] * len(subjects), [0.0] * len(subjects)
    kl, same = 0.0, 0
    for number, (inputs, targets) in enumerate(parts):
        progress("reading", number, len(parts))
        first: Tensor | None = None
        for i, subject in enumerate(subjects):
            start = time.perf_counter()
            logits = subject.module(inputs.to(subject.device), use_cache=False).logits.float()
            logits = logits.log_softmax(-1)
            wait(subject.device)
            seconds[i] += time.perf_counter() - start
            losses[i] += float(F.nll_loss(logits.flatten(0, 1), targets.to(subject.device).flatten(), reduction="sum"))
            if first is not None:
                kl += float((first.exp() * (first - logits)).sum())
                same += int((first.argmax(-1) == logits.argmax(-1)).sum())
            elif len(subjects) > 1:
                first = logits
    count = len(ids) - 1
    if not all(map(math.isfinite, losses)):
        bad = subjects[[math.isfinite(x) for x in losses].index(False)].name
        raise DeadweightError(f"{printable(bad)} gives probabilities that are not finite; nothing can be said of it")
    found = []
    for i, subject in enumerate(subjects):
        progress(f"timing {subject.name}")
        cache, speed = decoding(subject, ids[: min(length // 2, 128)])
        own = list(subject.module.parameters())
        other = {"kl": kl / count, "agreement": same / count} if i else {}
        found.append(
            Evaluation(
                subject.name,
                sum(p.numel() for p in own),
                count,
                size,
                losses[i] / count,
                count / max(seconds[i], 1e-9),
                speed,
                cache,
                sum(p.numel() * p.element_size() for p in own),
                **other,
            )
        )
    return tuple(found)


def decoding(subject: Subject, prompt: Tensor) -> tuple[int, float]:
    """Bytes of cache per token, and tokens per second written one at a time."""
    ids = prompt[None].to(subject.device)
    out = subject.module(ids, use_cache=True)
    cache = out.past_key_values
    bytes_per_token = cache_bytes(cache) // max(ids.shape[1], 1)
    token = out.logits[:, -1:].argmax(-1)
    room = min(DECODED, subject.context - ids.shape[1])
    start = time.perf_counter()
    for _ in range(room):
        out = subject.module(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    wait(subject.device)
    return bytes_per_token, room / max(time.perf_counter() - start, 1e-9)


def cache_bytes(cache: Any) -> int:
    """What the keys and values of all layers take."""
    layers = getattr(cache, "layers", [])
    tensors = [t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
