"""Attention on rows of codes, as transformers calls it.

Tokens of the current call and the first tokens of a sequence are used uncoded. Without a cache, attention is computed
as if tokens were decoded one by one: each query sees its own key and value uncoded, and the codes of all others.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import AttentionOptions, attend, options_of, softmax
from .cache import CURRENT, Call, CodedLayer, position_of, real_tokens
from .coder import Coder, Codes
from .cpu_decode import cached_rows, decode_on_cpu, decodes_on_cpu
from .kernels import decode_token, decodes

# The name of this attention implementation in transformers; a checkpoint brings a copy of this file along.
NAME = f"deadweight_coded_{zlib.crc32(__name__.encode()):x}"
SCORES = 1 << 26  # products of queries and keys that are held at a time
MASKED = 8192  # tokens, at most, for which a GPU attends with a mask of all pairs: 256 MB in half precision


def coded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention; on rows of bytes if the module has a coder."""
    options = options_of(module, query, attention_mask, given)
    coder: Coder | None = getattr(module, "coder", None)
    if coder is None:
        return attend(query, key, value, options).transpose(1, 2).contiguous(), None
    if coder.spec.reader != "codes":
        return on_states(coder, query, (key, value), options).transpose(1, 2).contiguous(), None
    if query.shape[1] != coder.spec.heads or query.shape[3] != coder.spec.d_qk:
        raise ValueError(
            f"found {query.shape[1]} query heads of {query.shape[3]} dimensions; expected {coder.spec.heads} of "
            f"{coder.spec.d_qk}, as the coded cache says"
        )
    options = options.with_scale(options.scale_of(query))
    call, CURRENT.call = CURRENT.of(coder), None
    if key.dtype != torch.uint8:
        out = as_if_decoded(coder, query, (key, value), options, None if call is None else call.positions)
    else:
        out = on_rows(coder, call, query, (key, value), options)
    return out.transpose(1, 2).contiguous(), None


def on_states(coder: Coder, query: Tensor, states: tuple[Tensor, Tensor], options: AttentionOptions) -> Tensor:
    """Attention on what the model has made of decoded states; without a cache, of decoded and of exact ones."""
    call = CURRENT.of(coder)  # it stays until the module is done: some attend twice
    assert call is not None, "attention on decoded states outside its module"
    if not call.doubled:
        return attend(query, *states, options)
    (coded_key, key), (coded_value, value) = (x.chunk(2, 2) for x in states)
    options = options.with_scale(options.scale_of(query))
    if options.mask is not None:
        options = options.with_mask(options.mask[..., : key.shape[2]])  # a bias may count the exact keys as later ones
    return with_own_token(query, (key, value), (coded_key, coded_value), options)


def as_if_decoded(
    coder: Coder, query: Tensor, states: tuple[Tensor, Tensor], options: AttentionOptions, positions: Tensor | None
) -> Tensor:
    """Attention without a cache: every query sees itself and the first tokens uncoded, and the codes of all others."""
    key, value = states
    coded = as_if_cached(coder, states, options.mask, positions)
    return with_own_token(coder.paired(query), (coder.paired(key), value), coded, options)


def as_if_cached(
    coder: Coder, states: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Paired keys and values as later tokens would read them: the first of a sequence uncoded, the others decoded."""
    key, value = states
    batch, new = len(key), key.shape[2]
    real = real_tokens(mask, batch, new, 0, key.device)
    start = torch.where(real.any(1), real.int().argmax(1), 0)
    places = torch.arange(new, device=key.device)
    zero = start - position_of(positions, start, new)
    coded_key, coded_value = coder.simulate(key, value, places - zero[:, None])
    exempt = (places - start[:, None] < coder.spec.first)[:, None, :, None]  # padding before the start is never seen
    return torch.where(exempt, coder.paired(key), coded_key), torch.where(exempt, value, coded_value)


def with_own_token(
    query: Tensor, exact: tuple[Tensor, Tensor], coded: tuple[Tensor, Tensor], options: AttentionOptions
) -> Tensor:
    """softmax(QKᵀ)V where on the diagonal keys and values are exact, and coded elsewhere.

    Scores of a long text would take more memory than the model, so queries come in parts unless gradients are needed.
    """
    groups = query.shape[1] // coded[0].shape[1]
    own, read = ([x.repeat_interleave(groups, 1) for x in pair] for pair in (exact, coded))
    if query.is_cuda and query.shape[2] <= MASKED and options.softcap is None and options.sinks is None:
        return among_both(query, own, read, options)
    tokens = query.shape[2]
    part = tokens
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        part = max(1, SCORES // max(1, query.shape[0] * query.shape[1] * tokens))
    starts = range(0, max(tokens, 1), part)
    return torch.cat([part_with_own_token(query, own, read, options, slice(i, i + part)) for i in starts], 2)


def among_both(query: Tensor, exact: list[Tensor], coded: list[Tensor], options: AttentionOptions) -> Tensor:
    """The same as one attention to coded and exact tokens side by side, with a mask: torch's fused kernels take it.

    They read twice as many keys, and write no scores, which on a GPU is several times as fast.
    """
    own = torch.eye(query.shape[2], dtype=torch.bool, device=query.device)
    least = torch.finfo(query.dtype).min  # not −∞: a row that sees nothing, as padding does, must not become NaN
    mask = torch.zeros_like(own, dtype=query.dtype)
    if options.causal:
        mask = mask.masked_fill(~torch.ones_like(own).tril(), least)
    elif options.mask is not None and options.mask.dtype == torch.bool:
        mask = mask.masked_fill(~options.mask, least)
    elif options.mask is not None:
        mask = options.mask.clamp(min=least).to(query.dtype)
    both = torch.cat([mask.masked_fill(own, least), mask.masked_fill(~own, least)], -1)
    keys, values = (torch.cat(pair, 2) for pair in zip(coded, exact, strict=True))
    return attend(query, keys, values, options._replace(mask=both, causal=False))


def part_with_own_token(
    query: Tensor, exact: list[Tensor], coded: list[Tensor], options: AttentionOptions, part: slice
) -> Tensor:
    """The same for some of the queries; without a mask, later tokens are left out."""
    tokens = query.shape[2]
    end = min(part.stop, tokens)
    read = end if options.causal else tokens
    query, key, value = query[:, :, part], exact[0][:, :, part], exact[1][:, :, part]
    coded_key, coded_value = (x[:, :, :read] for x in coded)
    scores = query @ coded_key.transpose(-1, -2)
    own = (query * key).sum(-1)
    scores = scores.diagonal_scatter(own, offset=part.start, dim1=-2, dim2=-1)
    weights = softmax(scores, of_part(options, part.start, end, query.device))
    kept = weights.diagonal(offset=part.start, dim1=-2, dim2=-1).unsqueeze(-1)
    return weights @ coded_value + kept * (value - coded_value[:, :, part])


def of_part(options: AttentionOptions, start: int, end: int, device: torch.device) -> AttentionOptions:
    """The options for these queries alone."""
    if options.causal and start > 0:
        seen = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
        return options._replace(mask=seen, causal=False)
    mask = options.mask
    return options if mask is None or mask.shape[-2] == 1 else options.with_mask(mask[..., start:end, :])


def on_rows(
    coder: Coder, call: Call | None, query: Tensor, rows: tuple[Tensor, Tensor], options: AttentionOptions
) -> Tensor:
    """Attention on the rows of a cache, in which the tokens of this call are the last."""
    if call is None or call.layer is None or call.key is None or call.value is None:
        raise NotImplementedError("attention on codes that another layer has cached, which coded caches do not support")
    new = call.key.shape[2]
    if isinstance(call.past, int) and call.past == 0:  # nothing is read from the cache
        mask = None if options.mask is None else options.mask[..., :new]
        return attend(query, call.key, call.value, options.with_mask(mask))
    layer = call.layer
    assert layer.start is not None and layer.zero is not None and layer.first is not None
    if decodes_on_cpu(call, query, options):
        cached = cached_rows(layer, int(call.past), rows)
        if cached is not None:
            return decode_on_cpu(coder, call, query, cached, options)
    units, exponents = rows
    places = torch.arange(units.shape[2], device=units.device)
    total = call.past + new
    away = torch.as_tensor(total - units.shape[2], device=units.device).clamp(min=0)  # tokens that left a window
    fresh = call.past - away + torch.arange(new, device=units.device)
    if decodes(coder, query, options):
        exact, span = [call.key, call.value], [fresh, layer.start - away, layer.zero - away]
        numbers = (coder.number, query, units, exponents, options.mask, list(layer.first), exact, span)
        return decode_token(*numbers, options.scale_of(query))
    codes = coder.read(units, exponents, query.dtype)
    key = coder.keys_of(codes, places + away - layer.origin)
    query = coder.paired(query)
    key = with_new(key, fresh, coder.paired(call.key))
    key = with_first(key, layer, coder.paired(layer.first[0]), away)
    if query.shape[2] == 1:
        return of_one_token(coder, query, key, codes, Exact(layer, call.value, fresh, away), options)
    value = coder.values_of(codes)
    value = with_new(value, fresh, call.value)
    return attend(query, key, with_first(value, layer, layer.first[1], away), options)


def with_new(states: Tensor, fresh: Tensor, new: Tensor) -> Tensor:
    """Keys or values of all rows, with those of the new tokens as they are; a compiler wants no change in place."""
    copy = Tensor.index_copy if torch.compiler.is_compiling() else Tensor.index_copy_
    return copy(states, 2, fresh, new.to(states.dtype))


@dataclass(frozen=True)
class Exact:
    """What one query reads uncoded: the first tokens of its sequence, and its own token."""

    layer: CodedLayer
    value: Tensor  # of the new token
    fresh: Tensor  # its row
    away: Tensor  # tokens that have left a sliding window


def of_one_token(
    coder: Coder, query: Tensor, key: Tensor, codes: Codes, exact: Exact, options: AttentionOptions
) -> Tensor:
    """Attention of one query: sum the coordinates of values first, then decode the one sum."""
    layer, value = exact.layer, exact.value
    assert layer.first is not None
    batch, heads = query.shape[:2]
    shared = query.reshape(batch, key.shape[1], -1, query.shape[-1])  # the query heads of a key head as rows
    weights = softmax((shared @ key.transpose(-1, -2)).view(batch, heads, 1, -1), options)
    rows = first_rows(layer, exact.away, key.shape[2])
    at = torch.cat([rows.at, exact.fresh.expand(batch, 1)], 1)
    is_fresh = at == exact.fresh
    known = torch.cat([rows.known & ~is_fresh[:, :-1], is_fresh[:, -1:]], 1)[:, None, None]  # b 1 1 exact
    hidden = (is_fresh | F.pad(rows.lies_there, (0, 1)))[:, None, None]  # repeated rows are written alike
    at = at[:, None, None].expand(-1, heads, -1, -1)
    there = weights.gather(3, at)
    coded = weights.scatter(3, at, there * ~hidden)
    kept = torch.cat([layer.first[1].to(value.dtype), value], 2).repeat_interleave(heads // value.shape[1], 1)
    return coder.gathered(coded, codes) + (there * known) @ kept.to(there.dtype)


@dataclass(frozen=True)
class FirstRows:
    """Where the first tokens of every sequence lie among the rows of a cache, (b, first) each.

    A token that has left a sliding window, or has not come yet, gets the nearest row. Then a row occurs several times,
    and the result must not depend on the order of writes.
    """

    at: Tensor
    known: Tensor  # whether the token lies in its row
    token: Tensor  # the first token that lies in the row
    lies_there: Tensor  # whether there is one


def first_rows(layer: CodedLayer, away: Tensor, rows: int) -> FirstRows:
    n = layer.coder.spec.first
    assert layer.start is not None
    start = layer.start[:, None] - away
    wanted = start + torch.arange(n, device=start.device)
    at = wanted.clamp(0, rows - 1)
    token = at - start
    return FirstRows(at, at == wanted, token.clamp(0, max(n - 1, 0)), (token >= 0) & (token < n))


def with_first(states: Tensor, layer: CodedLayer, first: Tensor, away: Tensor) -> Tensor:
    """Keys or values of all rows, with the first tokens of every sequence uncoded."""
    if not first.shape[2]:
        return states
    rows = first_rows(layer, away, states.shape[2])
    at, token = (x[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1]) for x in (rows.at, rows.token))
    exact = first.to(states.dtype).gather(2, token)
    kept = torch.where(rows.lies_there[:, None, :, None], exact, states.gather(2, at))
    if torch.is_grad_enabled():  # gather has kept the states for its gradient
        return states.scatter(2, at, kept)
    return states.scatter_(2, at, kept)
