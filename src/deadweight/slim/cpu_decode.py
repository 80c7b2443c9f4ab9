"""Decoding one token from a coded cache on a CPU.

It computes what `coded_attention.of_one_token` does, with fewer and cheaper operations:

- Codes become numbers, and keys are made of them, for a block of tokens at a time: beside the cache there is memory for
  one block. Codes without bits are left out.
- The two dimensions of a rotary pair are neighbours, so that turning keys is one product of complex numbers, with a
  part of a table that all layers share.
- The scale of a token multiplies its scores, not its key. The mean of the keys meets the query in a product of its own.
- What follows from the coder alone is computed once (`cpu_maps.py`).
- oneDNN makes the keys: in float32 it is twice as fast as the library that torch uses otherwise, on some processors.
  It compiles a product for every number of rows, so rows are filled up to a multiple of 64.

Half precision is computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import AttentionOptions, softmax
from .cache import Call, CodedLayer
from .coder import TABLE, Coder, precise
from .codes import SHIFT
from .cpu_maps import CpuMaps, Segment, SetMaps, cpu_maps, rotations
from .scratch import SCRATCH

BLOCK = 2048  # tokens of all sequences that are decoded at a time
ROWS = 64  # the number of tokens in a block is a multiple of this; those that are missing are zeros
ONE_DNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


@dataclass(frozen=True)
class Cached:
    """The rows of a cache, and where the tokens lie that are read uncoded."""

    units: Tensor  # (b, sets, t, units)
    exponents: Tensor  # (b, sets, t)
    zeros: list[int]  # the row of position 0 of every sequence; negative if it has left a sliding window
    at: list[list[int]]  # rows that are read uncoded, of every sequence: first tokens that are there, the new one last
    held: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # numbers of sets and stages, if of one block
    scales: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # of tokens, by set, stage and block

    @property
    def together(self) -> bool:
        """Whether the uncoded tokens lie in the same rows for all sequences."""
        return all(own == self.at[0] for own in self.at)

    @property
    def blocks(self) -> list[slice]:
        batch, _, tokens, _ = self.units.shape
        size = max(ROWS, BLOCK // max(1, batch) // ROWS * ROWS)
        return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


def decodes_on_cpu(call: Call, query: Tensor, options: AttentionOptions) -> bool:
    """Whether this call is one token for every sequence, after the tokens that are read uncoded, on a CPU."""
    modes = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if query.device.type != "cpu" or query.shape[2] != 1 or modes or options.dropout:
        return False
    return call.layer is not None and call.layer.is_settled(int(call.past))


def cached_rows(layer: CodedLayer, past: int, rows: tuple[Tensor, Tensor]) -> Cached | None:
    """The rows to read; None if a sliding window holds some of the first tokens and not the others."""
    assert layer.start is not None and layer.zero is not None
    units, exponents = rows
    away, n = max(0, past + 1 - units.shape[2]), layer.coder.spec.first
    starts = [start - away for start in layer.start.tolist()]
    if any(-n < start < 0 for start in starts):
        return None
    at = [[*range(start, start + n), past - away] if start >= 0 else [past - away] for start in starts]
    if len({len(own) for own in at}) > 1:
        return None
    zeros = [zero - away for zero in layer.zero.tolist()]
    return Cached(units.view(torch.int16), exponents.squeeze(3), zeros, at)


def decode_on_cpu(coder: Coder, call: Call, query: Tensor, cached: Cached, options: AttentionOptions) -> Tensor:
    """Attention of the new token of every sequence, (b, h, 1, d_v)."""
    maps, work = cpu_maps(coder, precise(query.dtype)), precise(query.dtype)
    asked = query.to(work)
    key, value = exact_states(call, len(cached.at[0]), work)
    products = coded_products(coder, maps, asked, cached)
    groups = query.shape[1] // key.shape[1]
    known = (asked.unflatten(1, (-1, groups)).squeeze(3) @ key.mT).flatten(1, 2)  # b h exact
    place(products, cached, known)
    weights = softmax(products.unsqueeze(2), options).squeeze(2)
    own = take(weights, cached)
    out = (own.unflatten(1, (-1, groups)) @ value).flatten(1, 2)
    return (gather_values(coder, maps, weights, cached) + out).unsqueeze(2).to(query.dtype)


def exact_states(call: Call, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values that are read uncoded, (b, g, count, d): all first tokens and the new one, or that one alone."""
    assert call.layer is not None and call.layer.first is not None and call.key is not None and call.value is not None
    pairs = zip(call.layer.first, (call.key, call.value), strict=True)
    key, value = (torch.cat([x, y], 2) if count > 1 else y for x, y in pairs)
    return key.to(dtype), value.to(dtype)


def place(products: Tensor, cached: Cached, exact: Tensor) -> None:
    """Write the products of uncoded tokens over those of their codes."""
    if cached.together:
        rows = cached.at[0]
        products[..., rows[-1]] = exact[..., -1]
        if len(rows) > 1:
            products[..., rows[0] : rows[-2] + 1] = exact[..., :-1]
        return
    products.scatter_(2, indices(cached, products), exact)


def take(weights: Tensor, cached: Cached) -> Tensor:
    """The weights of the uncoded tokens, (b, h, exact); zeros take their place."""
    if cached.together:
        rows = cached.at[0]
        parts = [weights[..., rows[0] : rows[-2] + 1]] if len(rows) > 1 else []
        parts.append(weights[..., rows[-1] :][..., :1])
        own = torch.cat(parts, -1)
        for part in parts:
            part.zero_()
        return own
    at = indices(cached, weights)
    own = weights.gather(2, at)
    weights.scatter_(2, at, 0.0)
    return own


def indices(cached: Cached, like: Tensor) -> Tensor:
    return torch.tensor(cached.at)[:, None].expand(-1, like.shape[1], -1)


def coded_products(coder: Coder, maps: CpuMaps, query: Tensor, cached: Cached) -> Tensor:
    """Products of the query with the keys of all rows, (b, h, t)."""
    turned = query.squeeze(2).index_select(2, maps.order)
    meant = with_mean(maps, turned)
    blocks = [block_products(coder, maps, turned, cached, block, meant) for block in cached.blocks]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def block_products(
    coder: Coder, maps: CpuMaps, query: Tensor, cached: Cached, block: slice, meant: tuple[Tensor, Tensor | None]
) -> Tensor:
    """Those of one block; `meant` are the products with the mean of the keys, as `with_mean` gives them."""
    turns = turns_of(maps, cached, block, query.dtype) if maps.rates else None
    per_set, each = query.shape[1] // len(maps.sets), []
    for i, own in enumerate(maps.sets):
        numbers = unpacked(own, i, 0, cached, block, query.dtype)
        keys = linear(numbers, own)[:, : block.stop - block.start]
        products = products_of(coder, keys, query[:, i * per_set : (i + 1) * per_set], turns)
        each.append(products.mul_(scales_of(maps, 0, i, cached, block)))
    products = each[0] if len(each) == 1 else torch.cat(each, 1)
    factors, rest = meant
    if turns is not None:
        waves = torch.view_as_real(turns).flatten(-2).mT
        products = torch.baddbmm(products, factors, waves.expand(len(factors), -1, -1))
    return products if rest is None else products + rest


def linear(numbers: Tensor, own: SetMaps) -> Tensor:
    """Keys before RoPE without their mean, (b, t, keys), in steps of the scale of a token."""
    if ONE_DNN is None or numbers.dtype != torch.float32 or not numbers.numel():
        return F.linear(numbers, own.to_keys, own.start)
    keys: Tensor = ONE_DNN(numbers, own.to_keys, own.start, "none", [], "")
    return keys


def weighted(weights: Tensor, numbers: Tensor) -> Tensor:
    """Sums of the numbers of tokens by weights, (b, queries, t) and (b, t or more, slots) → (b, queries, slots)."""
    if ONE_DNN is None or numbers.dtype != torch.float32 or len(numbers) != 1 or not numbers.numel():
        return weights @ numbers[:, : weights.shape[2]]
    weights = F.pad(weights[0], (0, numbers.shape[1] - weights.shape[2]))
    sums: Tensor = ONE_DNN(weights, numbers[0].T, None, "none", [], "")
    return sums.unsqueeze(0)


def products_of(coder: Coder, keys: Tensor, query: Tensor, turns: Tensor | None) -> Tensor:
    """Products of the queries of a set, (b, heads, d), with its keys, turned in place: (b, heads, t)."""
    pairs, size = coder.spec.pairs, coder.spec.d_qk
    heads = coder.spec.key_heads // coder.spec.n_sets
    query = query.unflatten(1, (heads, -1))
    rest = keys[..., 2 * pairs * heads : size * heads].unflatten(-1, (heads, -1))
    if turns is None:
        return (query @ rest.permute(0, 2, 3, 1)).flatten(1, 2)
    turning = keys[..., : 2 * pairs * heads].unflatten(-1, (heads, pairs, 2))
    torch.view_as_complex(turning).mul_(turns.unsqueeze(-2))
    products = query[..., : 2 * pairs] @ turning.flatten(3).permute(0, 2, 3, 1)
    if 2 * pairs < size:
        products = products + query[..., 2 * pairs :] @ rest.permute(0, 2, 3, 1)
    return products.flatten(1, 2)


def with_mean(maps: CpuMaps, query: Tensor) -> tuple[Tensor, Tensor | None]:
    """Products of the query with the mean of the keys: of rotary pairs, as factors of cosines and sines, (b, h, 2 ·
    pairs); and of the other dimensions, (b, h, 1), if there are any."""
    pairs, rest = maps.mean.shape[1], None
    if maps.rest_mean.shape[1]:
        rest = (query[..., 2 * pairs :] * maps.rest_mean).sum(-1, keepdim=True)
    both = query[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous()
    return torch.view_as_real(torch.view_as_complex(both) * maps.mean).flatten(2), rest


def turns_of(maps: CpuMaps, cached: Cached, block: slice, dtype: torch.dtype) -> Tensor:
    """Turns at the positions of these rows: (t, pairs), or (b, t, pairs) if they differ between sequences."""
    first, last = block.start - min(cached.zeros), block.stop - min(cached.zeros)
    table = rotations(maps.rates, max(1, -(-last // TABLE)) * TABLE, dtype)
    if len(set(cached.zeros)) == 1 and first >= 0:
        return table[first:last]
    rows = torch.arange(block.start, block.stop) - torch.tensor(cached.zeros)[:, None]
    return table[rows.clamp(min=0)]  # before the start there is padding, which no query sees


def scales_of(maps: CpuMaps, stage: int, index: int, cached: Cached, block: slice) -> Tensor:
    """The scales of tokens for a stage of a set, (b, 1, t)."""
    at = (index, stage, block.start)
    if at not in cached.scales:
        exponents = cached.exponents[:, index, block]
        scales = maps.scales[stage].index_select(0, exponents.flatten().int())
        cached.scales[at] = scales.view(exponents.shape).unsqueeze(1)
    return cached.scales[at]


def unpacked(own: SetMaps, index: int, stage: int, cached: Cached, block: slice, dtype: torch.dtype) -> Tensor:
    """The numbers of a stage of a set, (b, t, slots), filled up with zeros, in memory that other layers use too."""
    if (index, stage) in cached.held:
        return cached.held[index, stage]
    units = cached.units[:, index, block]
    batch, tokens = units.shape[:2]
    shape = (batch, -(-tokens // ROWS) * ROWS, own.sizes[stage])
    numbers = SCRATCH.take(f"numbers {index} {stage}", shape, units, dtype)
    numbers[:, tokens:].zero_()
    segments: tuple[Segment, ...] = own.stages[stage]
    upper = units >> SHIFT if any(s.upper for s in segments) else units
    for s in segments:
        numbers[:, :tokens, s.slots] = (upper if s.upper else units)[..., s.units] & s.mask
    if block.stop - block.start == cached.units.shape[2]:
        cached.held[index, stage] = numbers
    return numbers


def gather_values(coder: Coder, maps: CpuMaps, weights: Tensor, cached: Cached) -> Tensor:
    """The weighted sum of the values of all rows, (b, h, t) → (b, h, d_v): sum numbers first, then decode the sums."""
    heads = coder.spec.key_heads // coder.spec.n_sets
    per_set = weights.shape[1] // len(maps.sets)
    outputs = []
    for i, own in enumerate(maps.sets):
        share = weights[:, i * per_set : (i + 1) * per_set]
        sums: list[Any] = [0] * len(own.stages)
        totals: list[Any] = [0] * len(own.stages)
        for block in cached.blocks:
            for stage in range(len(own.stages)):
                scaled = share[..., block] * scales_of(maps, stage, i, cached, block)
                sums[stage] = sums[stage] + weighted(scaled, unpacked(own, i, stage, cached, block, share.dtype))
                totals[stage] = totals[stage] + scaled.sum(-1, keepdim=True)
        every = torch.cat([*sums, *totals, share.sum(-1, keepdim=True)], -1)
        outputs.append((every.unflatten(1, (heads, -1)) @ own.to_values).flatten(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
