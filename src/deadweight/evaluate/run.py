"""Loss, speed and cache of a language model on a text, alone or next to another model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.errors import DeadweightError
from deadweight.evaluate.seen import seen_share
from deadweight.notebook import Shown
from deadweight.progress import Progress, silent
from deadweight.source.hugging_face import without_bars
from deadweight.source.plain_text import boundary, check_text, read_text
from deadweight.source.printable import printable
from deadweight.source.tokens import encode_text, tokenizer_of
from deadweight.source.trial_run import refusing_failures
from deadweight.source.type_aliases import Options, PreTrained, Tokenizer

LONGEST = 1024  # tokens in a window, unless asked for more
DECODED = 64  # tokens that are generated to measure the speed
LEAST = 32  # tokens of a text: fewer say nothing about a model


@dataclass(frozen=True)
class Evaluation(Shown):
    """One model on one text."""

    model: str
    parameters: int
    tokens: int  # predicted
    bytes: int  # of text they stand for
    loss: float  # nats per token
    tokens_per_second: float  # prefill, in windows
    decoded_per_second: float  # one token at a time, with the cache
    kv_bytes_per_token: int
    weight_bytes: int
    kl: float | None = None  # nats per token, from the other model to this one
    agreement: float | None = None  # share of tokens for which both predict the same most likely token
    seen: float | None = None  # share of the text that the model was trained on; None: no record of its training

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / self.bytes


class Evaluations(tuple[Evaluation, ...], Shown):
    """A tuple of the evaluated models, the one to compare with first; notebooks show them side by side."""


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
) -> Evaluations:
    """Loss, speed and cache of a causal language model on a text; with `against`, of both, that one first.

    `limit` is the number of bytes of the text that are read. Both models must have the same tokenizer.
    """
    read = read_text(text, progress)
    check_text(read, text)
    whole = read
    read = read[: boundary(read, limit)] if limit and limit < len(read) else read
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    subjects = [
        EvaluatedModel.open(str(m), options, progress) for m in ([against] if against is not None else []) + [model]
    ]
    ids = [s.encode(read) for s in subjects]
    if len(ids) == 2 and ids[0] != ids[1]:
        raise DeadweightError(
            f"{printable(str(against))} and {printable(str(model))} encode the text as different tokens; expected "
            "two models with the same tokenizer"
        )
    if len(ids[0]) < LEAST:
        raise DeadweightError(
            f"{printable(text)} is too short (number of tokens: {len(ids[0])}); expected {LEAST} tokens or more"
        )
    length = context or min(LONGEST, *(s.context for s in subjects))
    for s in subjects:
        if length > s.context:
            raise DeadweightError(
                f"found a context of {length:,} tokens; {printable(s.name)} takes at most {s.context:,}"
            )
    results = measure_models(subjects, TokenText(torch.tensor(ids[0]), len(read), length, batch), progress)
    return Evaluations(replace(e, seen=seen_share(e.model, whole, len(read))) for e in results)


@dataclass
class EvaluatedModel:
    """A language model with its tokenizer."""

    name: str
    module: PreTrained
    tokenizer: Tokenizer
    context: int

    @classmethod
    def open(cls, name: str, options: Options, progress: Progress) -> EvaluatedModel:
        from deadweight import embedded
        from deadweight.save.load import load

        progress(f"loading {name}")
        folder = embedded.path() if name == "demo" else name
        with without_bars():
            module: PreTrained = load(folder, **{k: v for k, v in options.items() if v is not None})
        if not hasattr(module, "generate") or getattr(module.config, "is_encoder_decoder", False):
            raise DeadweightError(
                f"{printable(name)} is not a causal language model; expected one that predicts tokens"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        known = getattr(module.config, "max_position_embeddings", None)
        tokenizer = tokenizer_of(str(folder), trust_remote_code=bool(options.get("trust_remote_code")))
        return cls(name, module.to(device).eval(), tokenizer, known or LONGEST)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def encode(self, text: bytes) -> list[int]:
        return encode_text(text, self.tokenizer, self.module.config.vocab_size, self.name)


@dataclass(frozen=True)
class TokenText:
    """A text in tokens, read in batches of `batch` windows of `length` tokens."""

    ids: Tensor
    n_bytes: int
    length: int
    batch: int

    @property
    def n_predicted(self) -> int:
        return len(self.ids) - 1

    def windows(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets, batch by batch; the last window may be shorter."""
        whole = self.n_predicted // self.length * self.length
        rows, goals = (self.ids[i : whole + i].view(-1, self.length) for i in (0, 1))
        batches = list(zip(rows.split(self.batch), goals.split(self.batch), strict=True)) if whole else []
        rest = self.ids[whole:]
        return [*batches, (rest[None, :-1], rest[None, 1:])] if len(rest) > 1 else batches


@dataclass
class Totals:
    """Sums over all windows of one model, and its differences from the first model."""

    loss: float = 0.0
    seconds: float = 0.0
    kl: float = 0.0
    same: int = 0


@torch.no_grad()
def measure_models(subjects: list[EvaluatedModel], text: TokenText, progress: Progress) -> tuple[Evaluation, ...]:
    """All windows through all models, side by side."""
    totals = [Totals() for _ in subjects]
    windows = text.windows()
    for number, (inputs, targets) in enumerate(windows):
        progress("evaluating", number, len(windows))
        first: Tensor | None = None
        for total, subject in zip(totals, subjects, strict=True):
            start = time.perf_counter()
            with refusing_failures(subject.name):
                logits = subject.module(inputs.to(subject.device), use_cache=False).logits.float()
            logits = logits.log_softmax(-1)
            wait(subject.device)
            total.seconds += time.perf_counter() - start
            goals = targets.to(subject.device).flatten()
            total.loss += float(F.nll_loss(logits.flatten(0, 1), goals, reduction="sum"))
            if first is not None:
                total.kl += float((first.exp() * (first - logits)).sum())
                total.same += int((first.argmax(-1) == logits.argmax(-1)).sum())
            elif len(subjects) > 1:
                first = logits
    for total, subject in zip(totals, subjects, strict=True):
        if not math.isfinite(total.loss):
            name = printable(subject.name)
            raise DeadweightError(
                f"{name} returns probabilities that are not finite; expected finite ones: check its weights and --dtype"
            )
    evaluations = [make_evaluation(s, text, t, progress) for s, t in zip(subjects, totals, strict=True)]
    against = [
        replace(e, kl=t.kl / e.tokens, agreement=t.same / e.tokens) for e, t in zip(evaluations, totals, strict=True)
    ]
    return (*evaluations[:1], *against[1:])


def make_evaluation(subject: EvaluatedModel, text: TokenText, total: Totals, progress: Progress) -> Evaluation:
    """The evaluation of one model from its sums."""
    cache, speed = time_decoding(subject, text.ids[: min(text.length // 2, 128)], progress)
    own = list(subject.module.parameters())
    return Evaluation(
        subject.name,
        sum(p.numel() for p in own),
        text.n_predicted,
        text.n_bytes,
        total.loss / text.n_predicted,
        text.n_predicted / max(total.seconds, 1e-9),
        speed,
        cache,
        sum(p.numel() * p.element_size() for p in own),
    )


def time_decoding(subject: EvaluatedModel, prompt: Tensor, progress: Progress) -> tuple[int, float]:
    """Bytes of cache per token, and tokens per second when decoding one token at a time."""
    ids = prompt[None].to(subject.device)
    out = subject.module(ids, use_cache=True)
    cache = out.past_key_values
    bytes_per_token = cache_bytes(cache) // max(ids.shape[1], 1)
    token = out.logits[:, -1:].argmax(-1)
    room = min(DECODED, subject.context - ids.shape[1])
    start = time.perf_counter()
    for number in range(room):
        progress(f"timing {subject.name}", number, room)
        out = subject.module(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    wait(subject.device)
    return bytes_per_token, room / max(time.perf_counter() - start, 1e-9)


def cache_bytes(cache: object) -> int:
    """The bytes of the keys and values of all layers."""
    layers = getattr(cache, "layers", [])
    tensors = [t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
