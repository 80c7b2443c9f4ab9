"""Softmax attention as the models of deadweight compute it, and the options with which transformers calls it.

It imports only torch and transformers, so that it can travel with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "deadweight"  # of this attention implementation in transformers
ALIGNED = 8  # torch's fast attention takes head dimensions that are multiples of this
MASKED = "_masked"  # after the name of an implementation: it is always given its mask
BIAS = "position_bias"  # an argument of attention that is added to the scaled products
HARMLESS = {  # arguments of attention that do not change its result
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "sliding_window",
    "use_cache",
    "position_embeddings",
}


class AttentionOptions(NamedTuple):
    """Everything that attention depends on besides queries, keys and values."""

    mask: Tensor | None = None
    scaling: float | None = None  # None: one over the square root of the head dimension
    causal: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None  # a logit for every query head that takes part in the softmax and has no value

    def scale_of(self, query: Tensor) -> float:
        """The factor of the products of these queries with keys."""
        return float(query.shape[-1] ** -0.5) if self.scaling is None else self.scaling

    def with_scale(self, scaling: float) -> AttentionOptions:
        return self._replace(scaling=scaling)

    def with_mask(self, mask: Tensor | None) -> AttentionOptions:
        return self._replace(mask=mask)


def options_of(module: nn.Module, query: Tensor, mask: Tensor | None, given: dict[str, Any]) -> AttentionOptions:
    """The options of one call by transformers; raises NotImplementedError for unknown arguments."""
    extra = {n: v for n, v in given.items() if v is not None and v is not False}
    known = {"scaling", "dropout", "is_causal", "softcap", "s_aux", BIAS} | HARMLESS
    if strange := sorted(set(extra) - known):
        raise NotImplementedError(f"attention with {', '.join(strange)}, which compressed heads do not support")
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and mask is None and query.shape[2] > 1
    if given.get(BIAS) is not None:
        mask, causal = with_bias(mask, given[BIAS], causal), False
    return AttentionOptions(
        mask,
        given.get("scaling"),
        causal,
        given.get("dropout") or 0.0,
        given.get("softcap"),
        given.get("s_aux"),
    )


def with_bias(mask: Tensor | None, bias: Tensor, causal: bool) -> Tensor:
    """A mask that adds a bias for every query and key, (b or 1, h, t, keys), and hides what the mask hides."""
    if mask is None:
        if not causal:
            return bias
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    bias = bias[..., : mask.shape[-1]]
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """softmax(scaling · Q Kᵀ + mask) V. Groups of query heads may share keys, and other groups may share values."""
    special = options.softcap is not None or options.sinks is not None
    if special or (query.shape[2] == 1 and options.dropout == 0):
        return spelled_out(query, key, value, options)
    heads, size, scaling = query.shape[1], value.shape[-1], options.scale_of(query)
    query, key, value = padded_alike(query, key, value)
    if key.shape[1] < heads and key.shape[1] == value.shape[1] and options.mask is None:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=options.dropout, is_causal=options.causal, scale=scaling, enable_gqa=True
        )
        return out[..., :size]
    key, value = (z.repeat_interleave(heads // z.shape[1], 1) for z in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=options.mask, dropout_p=options.dropout, is_causal=options.causal, scale=scaling
    )[..., :size]


def padded_alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values padded with zeros to one aligned head dimension, which torch's fast attention needs."""
    size = -(-max(key.shape[-1], value.shape[-1]) // ALIGNED) * ALIGNED
    query, key, value = (F.pad(z, (0, size - z.shape[-1])) if z.shape[-1] < size else z for z in (query, key, value))
    return query, key, value


def spelled_out(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention as two matrix products, each of which reads keys or values once for all query heads that share them."""
    b, h, t, _ = query.shape
    shared = query.reshape(b, key.shape[1], -1, query.shape[-1])  # the query heads of a key head as rows
    products = (shared @ key.transpose(-1, -2)).view(b, h, t, -1)
    weights = softmax(products, options.with_scale(options.scale_of(query))).to(value.dtype)
    return (weights.reshape(b, value.shape[1], -1, weights.shape[-1]) @ value).view(b, h, t, -1)


def softmax(products: Tensor, options: AttentionOptions) -> Tensor:
    """Weights from products of queries and keys, (b, h, t, keys): scaled, capped, masked, beside a sink."""
    assert options.scaling is not None  # it depends on the head dimension, which the products do not show
    scores = products * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    mask = options.mask
    if mask is not None:
        least = torch.finfo(scores.dtype).min  # a row that sees nothing, as padding does, must not become NaN
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    precise = torch.promote_types(scores.dtype, torch.float32)
    if options.sinks is None:
        weights = scores.softmax(-1, dtype=precise).to(scores.dtype)
    else:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=precise)[..., :-1].to(scores.dtype)
    return F.dropout(weights, options.dropout) if options.dropout else weights


def side_by_side(states: Tensor, count: int) -> Tensor:
    """(b, g, t, d) as (b, g / count, t, count·d): concatenate neighbouring heads."""
    return states.unflatten(1, (-1, count)).transpose(2, 3).flatten(3)


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """`attend`, in the form in which transformers calls it."""
    options = options_of(module, query, attention_mask, given)
    return attend(query, key, value, options).transpose(1, 2).contiguous(), None


def offer(name: str, attention: Callable[..., Any]) -> None:
    """Make an attention implementation known to transformers, with masks as for torch's fused attention."""
    for full, mask in ((name, sdpa_mask), (name + MASKED, every_mask)):
        AttentionInterface.register(full, attention)
        AttentionMaskInterface.register(full, mask)


def every_mask(*args: Any, **given: Any) -> Tensor | None:
    """The mask, also where `is_causal` of an attention module would say the same."""
    return sdpa_mask(*args, **(given | {"allow_is_causal_skip": False}))


def choose(model: Any, name: str) -> None:
    """Let a model compute attention by an implementation that was offered.

    A model made for eager attention alone may have decoders whose modules do not say that they are causal.
    """
    trusted = model._supports_sdpa or all(getattr(m, "is_causal", True) for m in model.modules())
    model.set_attn_implementation(name if trusted else name + MASKED)


def use(model: Any) -> None:
    """Let a model compute attention with `attend`."""
    offer(NAME, plain_attention)
    choose(model, NAME)
