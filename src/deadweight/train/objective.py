"""From tokens to a loss: the model with its readout, in the precision of the run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deadweight.train.fused_loss import fused_cross_entropy, is_fused
from deadweight.train.masking import split_hidden
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM

LanguageModel: TypeAlias = TransformerForCausalLM | TransformerForMaskedLM


def language_model(config: TransformerConfig) -> LanguageModel:
    """A decoder, or an encoder with a readout."""
    return TransformerForCausalLM(config) if config.causal else TransformerForMaskedLM(config)


def precision_of(train: Train, device: torch.device) -> torch.dtype:
    wanted = train.precision if train.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if wanted == "bf16" else torch.float32


class Objective(nn.Module):
    """The mean negative log-likelihood of the next token, or of an encoder's masked tokens, in nats: the module that
    DDP wraps, FSDP shards, and torch.compile compiles."""

    def __init__(self, model: LanguageModel, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` are windows of context + 1 tokens; for an encoder, of context tokens, some of them masked."""
        causal = self.model.config.causal
        if causal:
            inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        else:
            inputs, targets = split_hidden(tokens, self.model.config.vocab_size)
            targets = targets.flatten()
        with self.autocast(tokens.device.type):
            hidden = self.model.transformer(inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            if causal and is_fused(hidden, self.model.readout, self.precision):
                return fused_cross_entropy(hidden.to(self.precision), self.model.readout.weight, targets)
            return F.cross_entropy(self.model.readout(hidden).float(), targets)

    def autocast(self, device: str) -> AbstractContextManager[None]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device, self.precision)
