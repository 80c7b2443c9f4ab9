"""GELU for training on a GPU: the normal distribution by one exponential, one reciprocal and a polynomial.

The error function of the GPU's library takes so many instructions that GELU is bound by arithmetic instead of memory.
Here the tail of the distribution is e^(−x²/2) · polynomial(1 / (1 + p|x|)) (Abramowitz and Stegun, 7.1.26):
its error is below 1e-7, a thousandth of what bfloat16 rounds off, and the gradient needs the same exponential.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from deadweight.transformer import TransformerForCausalLM
from deadweight.transformer.modeling import MLP

P = 0.3275911 / math.sqrt(2)
POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cumulative distribution of the standard normal at x, and its density."""
    bell = torch.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + P * x.abs())
    polynomial = torch.full_like(t, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        polynomial = polynomial * t + coefficient
    tail = 0.5 * polynomial * bell
    return torch.where(x < 0, tail, 1.0 - tail), bell / math.sqrt(2 * math.pi)


class FastGelu(torch.autograd.Function):
    """x·Φ(x); only x is saved for the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * normal(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: BackwardCFunction, *outer: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, density = normal(wide)
        return (outer[0].float() * (below + wide * density)).to(x.dtype)


def fast_gelu(x: Tensor) -> Tensor:
    """A plain function, since torch.compile does not trace `FastGelu.apply` as an attribute."""
    result: Tensor = FastGelu.apply(x)
    return result


def with_fast_gelu(model: TransformerForCausalLM) -> TransformerForCausalLM:
    """Replace the GELU of the model by the fast one. It is faster only if torch.compile fuses it into one kernel."""
    for module in model.modules():
        if isinstance(module, MLP) and model.config.activation == "gelu":
            module.activation = fast_gelu
    return model
