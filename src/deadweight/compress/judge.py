"""The loss of a compressed model, beside the original on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.compress.calibration import Batch
from deadweight.compress.result import Judgement
from deadweight.errors import DeadweightError

AT_A_TIME = 256  # tokens at a time: distributions over the whole vocabulary are large
NONE = -100  # no next token


@torch.no_grad()
def judge(original: Any, compressed: Any, batches: Sequence[Batch], *, decoder: bool = False) -> Judgement:
    """The KL divergence and, for language models, the losses of both; with `decoder`, also behind an encoder."""
    crosses = getattr(getattr(original, "config", None), "is_encoder_decoder", False)
    causal = hasattr(original, "generate") and (decoder or not crosses)
    predicts = "decoder_input_ids" if crosses else "input_ids"
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = predicted = 0
    logits = False
    for batch in batches:
        first, logits = main_output(run_model(original, batch))
        second, _ = main_output(run_model(compressed, batch))
        goal = None
        if logits and causal and predicts in batch:
            goal = F.pad(batch[predicts][:, 1:], (0, 1), value=NONE).flatten()
            predicted += int((goal != NONE).sum())
        tokens += first[..., 0].numel()
        for at in torch.arange(first[..., 0].numel(), device=first.device).split(AT_A_TIME):
            a, b = first.flatten(0, -2)[at].float(), second.flatten(0, -2)[at].float()
            if not logits:
                sums[0] += float(((a - b).pow(2).sum(-1) / a.pow(2).sum(-1).clamp(min=1e-30)).sum())
                sums[3] += float(F.cosine_similarity(a, b, dim=-1).sum())
                continue
            a, b = a.log_softmax(-1), b.log_softmax(-1)
            sums[0] += float((a.exp() * (a - b)).sum())
            if goal is not None:
                sums[1] += float(F.nll_loss(a, goal[at], ignore_index=NONE, reduction="sum"))
                sums[2] += float(F.nll_loss(b, goal[at], ignore_index=NONE, reduction="sum"))
    error, before, after, cosine = sums.tolist()
    return Judgement(
        tokens,
        error / tokens,
        "kl" if logits else "relative squared error",
        before / predicted if predicted else None,
        after / predicted if predicted else None,
        None if logits else cosine / tokens,
    )


def run_model(model: Any, batch: Batch, *, words: bool = True) -> Any:
    """The model's output, without a cache. If not `words`, logits are not computed where the model allows that."""
    how: dict[str, Any] = {"use_cache": False} if hasattr(model, "generate") else {}
    if not words and "logits_to_keep" in signature(model.forward).parameters:
        how["logits_to_keep"] = 1
    return model(**batch, **how)


def main_output(output: Any) -> tuple[Tensor, bool]:
    """The output to compare: logits if there are any (True), else the last hidden state."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor, name == "logits"
    raise DeadweightError(
        f"found a {type(output).__name__} as the model's output; expected logits or a last hidden state, by which a "
        "smaller model can be judged"
    )
