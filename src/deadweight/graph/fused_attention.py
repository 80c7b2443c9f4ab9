"""Fused operations spelled out, so that the rules see the softmax inside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deadweight.graph.einsum import spell_out_einsum
from deadweight.graph.strides import with_layout_of
from deadweight.source.private_api import OpOverload
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

aten = torch.ops.aten


@cache
def decompositions() -> dict[OpOverload, Callable[..., Leaf]]:
    """Operations that we write as matmul, softmax and friends; everything else stays as exported."""
    spelled_out: dict[OpOverload, Callable[..., Tensor]] = {
        aten.scaled_dot_product_attention.default: spell_out_attention,
        aten.einsum.default: spell_out_einsum,
    }
    return {fused: with_layout_of(fused, function) for fused, function in spelled_out.items()}


class SpelledOut(TorchFunctionMode):
    """While a model is traced, fused operations run spelled out, so that the trace need not be lowered for them."""

    def __torch_function__(
        self, func: Callable[..., Leaf], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        table = decompositions()
        if func is torch.nn.functional.scaled_dot_product_attention:
            return table[aten.scaled_dot_product_attention.default](*args, **(kwargs or {}))
        if func is torch.einsum and not kwargs and isinstance(args[0], str):
            operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
            return table[aten.einsum.default](args[0], list(operands))
        if func in DROPOUTS and dropout_is_off(*args, **(kwargs or {})):
            return args[0]  # as in eager mode: writing to the result writes to the operand
        return func(*args, **(kwargs or {}))


DROPOUTS = {torch.nn.functional.dropout, torch.dropout}


def dropout_is_off(*args: Leaf, **kwargs: Leaf) -> bool:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return bool(args) and not given.get("training", given.get("train", True))


def spell_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v with the signature of torch's; key-value heads are repeated for grouped queries.

    With a mask, a query that sees no key gets zeros, as in torch.
    """
    if enable_gqa and key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1) if attn_mask is None else aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)
