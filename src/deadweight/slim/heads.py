"""Smaller heads: only the kept dimensions of every key head's keys and values are cached and multiplied.

The model's own code still sees heads of their old size, with zeros in the dropped dimensions. A `HeadPacking` removes
these before they reach the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .attention import BIAS, AttentionOptions, attend, choose, offer, options_of
from .format import HeadsSpec

NAME = "deadweight_heads"  # of this attention implementation in transformers


class HeadPacking(nn.Module):
    """Keys and values of one attention without the dimensions that are not kept.

    The first dimensions of values are kept. So are those of keys, unless the spec says that they are listed: RoPE ties
    a dimension to its frequency. Packed, keys and values are (batch, key heads, tokens, kept) if all key heads keep the
    same number, else (batch, 1, tokens, all kept), side by side: both in the same way, because a static cache gives
    them the same number of heads.
    """

    key_dimensions: Tensor

    def __init__(self, spec: HeadsSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.listed:
            self.register_buffer("key_dimensions", torch.zeros(sum(spec.keys), dtype=torch.int32))

    @property
    def is_even(self) -> bool:
        """Whether all key heads keep the same number of dimensions."""
        return len(set(self.spec.keys)) == len(set(self.spec.values)) == 1

    def pack(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole heads, (b, g, t, d), without the dimensions that are not kept."""
        keys = [self.kept_of(key[:, i], i) for i in range(self.spec.key_heads)]
        values = [value[:, i, :, :kept] for i, kept in enumerate(self.spec.values)]
        return self.as_one(keys), self.as_one(values)

    def as_one(self, states: list[Tensor]) -> Tensor:
        """(b, t, kept) of every key head as one tensor."""
        return torch.stack(states, 1) if self.is_even else torch.cat(states, -1).unsqueeze(1)

    def kept_of(self, states: Tensor, head: int) -> Tensor:
        """The kept dimensions of the keys of one key head, or of queries that meet them."""
        start, count = sum(self.spec.keys[:head]), self.spec.keys[head]
        if not self.spec.listed:
            return states[..., :count]
        return states.index_select(-1, self.key_dimensions[start : start + count])

    def is_packed(self, key: Tensor, value: Tensor) -> bool:
        sides = (self.spec.keys, self.spec.values)
        shapes = [(len(kept), kept[0]) if self.is_even else (1, sum(kept)) for kept in sides]
        return shapes == [(states.shape[1], states.shape[-1]) for states in (key, value)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention on packed keys and values: (b, h, t, d_v), with zeros where values are not kept."""
        outputs = []
        for first, last in self.runs():
            q = self.queries_of(query, first, last)
            k = heads_between(key, self.spec.keys, first, last)
            v = heads_between(value, self.spec.values, first, last)
            out = attend(q, k, v, options)
            outputs.append(F.pad(out, (0, self.spec.d_v - out.shape[-1])))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def queries_of(self, query: Tensor, first: int, last: int) -> Tensor:
        """The queries for the packed keys of some key heads, (b, heads, t, kept), from queries of whole heads."""
        groups = self.spec.heads // self.spec.key_heads
        parts = [self.kept_of(query[:, i * groups : (i + 1) * groups], i) for i in range(first, last)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring key heads that keep the same numbers: one call of attention serves them."""
        sizes = list(zip(self.spec.keys, self.spec.values, strict=True))
        starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
        return list(zip(starts, [*starts[1:], self.spec.key_heads], strict=True))


def heads_between(states: Tensor, kept: tuple[int, ...], first: int, last: int) -> Tensor:
    """The packed states of neighbouring key heads that keep the same number, (b, heads, t, kept)."""
    if states.shape[1] == len(kept):
        return states[:, first:last]
    start, stop = sum(kept[:first]), sum(kept[:last])
    return states[:, 0, :, start:stop].unflatten(-1, (last - first, kept[first])).transpose(1, 2)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention; on packed keys and values if they come from a cache."""
    options = options_of(module, query, attention_mask, given)
    if strange := [name for name in ("s_aux", BIAS) if given.get(name) is not None]:
        raise NotImplementedError(f"attention with {strange[0]}, which compressed heads do not support")
    packing: HeadPacking | None = getattr(module, "packing", None)
    if packing is not None and packing.is_packed(key, value):
        scaling = packing.spec.d_qk**-0.5 if options.scaling is None else options.scaling
        out = packing.attend(query, key, value, options.with_scale(scaling))
    else:
        out = attend(query, key, value, options)
    return out.transpose(1, 2).contiguous(), None


class PackedCache:
    """A cache that takes whole keys and values and stores packed ones."""

    def __init__(self, cache: Any, packing: HeadPacking) -> None:
        self._cache, self._packing = cache, packing

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(*self._packing.pack(key_states, value_states), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        return PackedCache(value, self._packing) if isinstance(value, Cache) else value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the model's code asks what kind of cache it has
        return type(self.__dict__.get("_cache", self))  # torch.compile asks before there is one


def pack_caches(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before an attention module: make its cache store packed keys and values."""

    def wrapped(value: Any) -> Any:
        plain = isinstance(value, Cache) and type(value) is not PackedCache
        return PackedCache(value, module.packing) if plain else value

    return tuple(wrapped(a) for a in args), {n: wrapped(v) for n, v in kwargs.items()}


def install_heads(model: Any, specs: dict[str, HeadsSpec]) -> None:
    """Give each attention module with smaller heads its packing."""
    offer(NAME, packed_attention)
    for path, spec in specs.items():
        module = model.get_submodule(path)
        module.packing = HeadPacking(spec)
        module.register_forward_pre_hook(pack_caches, with_kwargs=True)
    choose(model, NAME)
