"""Cross-entropy over a large vocabulary on a GPU: one kernel for the loss and the gradient of the logits.

A plain softmax reads the logits of a batch (3.3 GB for 32,768 tokens of GPT-2's vocabulary in bfloat16) in the forward
pass, and reads and writes them again in the backward pass. Here a row stays in the GPU's cache between the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx

LARGE = 4096  # tokens of the vocabulary; below, the logits are small


def is_fused(hidden: Tensor, readout: nn.Linear, precision: torch.dtype) -> bool:
    """Whether the kernel applies: a GPU, bfloat16, a large vocabulary without a bias, and gradients wanted."""
    large = readout.out_features >= LARGE and readout.bias is None
    return hidden.is_cuda and precision == torch.bfloat16 and large and torch.is_grad_enabled()


def fused_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of hidden·weightᵀ against the targets."""
    return ReadoutLoss.apply(hidden, weight, targets)


class ReadoutLoss(torch.autograd.Function):
    """The forward pass computes the gradient of the logits too, in the memory of the logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rounded = weight.to(hidden.dtype)
        gradient = hidden @ rounded.T
        losses = kernel()(gradient, targets)
        ctx.save_for_backward(gradient, hidden, rounded)
        return losses.mean()

    @staticmethod
    def backward(ctx: BackwardCFunction, *outer: Tensor) -> tuple[Tensor, Tensor, None]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        gradient, hidden, rounded = saved
        factor = outer[0]
        return (gradient @ rounded) * factor.to(hidden.dtype), (gradient.T @ hidden).float() * factor, None


_kernel: Callable[[Tensor, Tensor], Tensor] | None = None


def kernel() -> Callable[[Tensor, Tensor], Tensor]:
    """losses(logits, targets), which overwrites the logits; compiled by Triton when first used."""
    global _kernel
    if _kernel is None:
        from deadweight.train.triton_loss import losses_in_place

        _kernel = losses_in_place
    return _kernel
