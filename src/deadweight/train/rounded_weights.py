"""Weights rounded to few bits after training, the plainest way: one scale per row, symmetric around zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Each row on a grid of 2^bits − 1 points whose ends are its largest magnitude."""
    step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (weight / step).round() * step, weight)


@torch.no_grad()
def round_linear_layers(model: nn.Module, bits: int) -> None:
    """Round the weights of every linear layer, but not a readout that is tied to the embedding."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables:
            module.weight.copy_(rounded(module.weight, bits))
