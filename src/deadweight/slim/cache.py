"""A coded key-value cache: a row of bytes for each token, between a model's own code and its attention.

It needs torch and transformers alone, so that it can travel with the checkpoint. The model's code goes on to see keys
and values of their usual shape. What it hands to its cache is encoded (`Coder`), stored by a `CodedLayer`, which leaves
the storing of rows to a cache layer of transformers (dynamic, static, sliding), and decoded when attention is computed.

Keys are encoded before rotary positions: they are turned back by the angle of their place in the sequence, and forward
again when they are read. Whatever that angle is, the two cancel; the right one makes keys easier to code.

Tokens of the current call are used as they are, and so are the first ones of a sequence. Without a cache, attention is
computed as if every token had been decoded one by one: each query sees its own key and value, and codes of the others.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .attention import attention, how_of
from .codes import row
from .format import CacheSpec, SideSpec

NAME = "deadweight_coded"  # of this attention among those of transformers
OCTAVE = 8  # steps of the scale of a token: it is 2^(n / 8)


class SideCoder(nn.Module):
    """Encodes and decodes keys, or values: x = mean + decode · z, z rounded to as many bits as its width says."""

    mean: Tensor

    def __init__(self, spec: SideSpec) -> None:
        super().__init__()
        self.spec = spec
        self.row = [row(run) for run in spec.runs]
        self.kept = tuple(sum(run) for run in spec.runs)
        self.register_buffer("mean", torch.zeros(len(spec.runs), spec.size))
        for i, kept in enumerate(self.kept):
            self.register_buffer(f"decode_{i}", torch.empty(spec.size, kept))
            self.register_buffer(f"encode_{i}", torch.empty(kept, spec.size))

    def coordinates(self, states: Tensor) -> list[Tensor]:
        """Of heads (b, g, t, d) the coordinates of every set, (b, t, kept)."""
        mean = self.mean.to(states.dtype)
        maps = [self.get_buffer(f"encode_{i}").to(states.dtype) for i in range(len(self.kept))]
        return [F.linear(x - mean[i], maps[i]) for i, x in enumerate(self.sets(states))]

    def sets(self, states: Tensor) -> tuple[Tensor, ...]:
        """Heads (b, g, t, d) as vectors of every set, (b, t, size)."""
        return states.unflatten(1, (len(self.kept), -1)).transpose(2, 3).flatten(3).unbind(1)

    def exponent(self, coordinates: list[Tensor]) -> Tensor:
        """By how many steps the scale of a token must grow for nothing to be clipped, (b, t) as integers from 0 on."""
        largest = torch.ones(coordinates[0].shape[:-1], device=coordinates[0].device)
        for z, row_of in zip(coordinates, self.row, strict=True):
            if row_of.kept:
                largest = torch.maximum(largest, (z.float().abs() / row_of.reach.to(z.device)).amax(-1))
        largest = torch.nan_to_num(largest, nan=math.inf)
        return (torch.log2(largest) * OCTAVE).ceil().clamp(max=255).to(torch.uint8)

    def rounded(self, coordinates: list[Tensor]) -> list[Tensor]:
        """The coordinates as they would come back from the cache; gradients pass as if nothing had been rounded."""
        scale = scale_of(self.exponent(coordinates))[..., None]
        pairs = zip(coordinates, self.row, strict=True)
        values = [row_of.values(row_of.encode(z.float() / scale), torch.float32) * scale for z, row_of in pairs]
        return [z + (value.to(z.dtype) - z).detach() for z, value in zip(coordinates, values, strict=True)]

    def rows(self, coordinates: list[Tensor]) -> Tensor:
        """Coordinates as bytes, (b, 1, t, row_bytes)."""
        exponent = self.exponent(coordinates)
        scale = scale_of(exponent)[..., None]
        pairs = zip(coordinates, self.row, strict=True)
        packed = [row_of.pack(row_of.encode(z.float() / scale)) for z, row_of in pairs]
        return torch.cat([exponent[..., None], *packed], -1).unsqueeze(1)

    def read(self, rows: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Bytes as the coordinates of every set, (b, t, kept)."""
        rows = rows.squeeze(1)
        scale = scale_of(rows[..., :1]).to(dtype)
        parts = rows[..., 1:].split([row_of.size for row_of in self.row], -1)
        return [row_of.values(row_of.unpack(p), dtype).mul_(scale) for p, row_of in zip(parts, self.row, strict=True)]

    def states(self, coordinates: list[Tensor], heads: int) -> Tensor:
        """Coordinates as heads (b, heads, t, d)."""
        sets = [
            F.linear(z, self.get_buffer(f"decode_{i}").to(z.dtype), self.mean[i].to(z.dtype))
            for i, z in enumerate(coordinates)
        ]
        per_set = heads // len(sets)
        return torch.stack(sets, 1).unflatten(-1, (per_set, -1)).transpose(2, 3).flatten(1, 2)

    def gathered(self, weights: Tensor, rows: Tensor, heads: int) -> Tensor:
        """What is gathered of the states of so many heads in rows by weights, (b, h, 1, t) → (b, h, 1, d)."""
        members = heads // len(self.row)  # key heads of a set
        outputs = []
        shares = weights.squeeze(2).chunk(len(self.row), 1)
        for i, (own, z) in enumerate(zip(shares, self.read(rows, weights.dtype), strict=True)):
            codes = (own @ z).unflatten(1, (members, -1))  # b members groups kept
            decode = self.get_buffer(f"decode_{i}").to(z.dtype).unflatten(0, (members, -1))
            mean = self.mean[i].to(z.dtype).unflatten(0, (members, -1))[:, None]
            share = own.sum(-1).unflatten(1, (members, -1))[..., None]
            outputs.append((codes @ decode.transpose(1, 2) + share * mean).flatten(1, 2))
        return torch.cat(outputs, 1).unsqueeze(2)


def scale_of(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.float() / OCTAVE)


class Coder(nn.Module):
    """Encodes what one attention caches, and computes attention on it."""

    pair_places: Tensor
    rates: Tensor
    call: Call | None = None  # what the attention module is being called with; the interface of transformers hides it

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self.keys, self.values = SideCoder(spec.keys), SideCoder(spec.values)
        self.rounds = True  # False: coordinates are kept as they are, to test all but the rounding
        if spec.pairs:
            self.register_buffer("pair_places", torch.zeros(2 * spec.pairs, dtype=torch.int32))
            self.register_buffer("rates", torch.zeros(spec.pairs, dtype=torch.int32))  # bits of float32: no cast harms

    def is_like(self, other: Coder) -> bool:
        """Whether the other one reads what this one has written, as a copy does."""
        if self.spec != other.spec:
            return False
        pairs = zip(self.buffers(), other.buffers(), strict=True)
        return all(torch.equal(a, b.to(a.device, a.dtype)) for a, b in pairs)

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Keys (b, g, t, d) turned as at these positions, (b or 1, t), or turned back.

        Each number becomes cos · itself ± sin · its partner; those that positions do not turn have angle 0.
        """
        if not self.spec.pairs:
            return keys
        first, second = self.pair_places.long().chunk(2)
        partner = torch.arange(self.spec.d_qk, device=keys.device)
        partner = partner.index_copy(0, first, second).index_copy(0, second, first)
        rates = torch.zeros(self.spec.d_qk, device=keys.device)
        rates = rates.index_copy(0, first, -self.rates.view(torch.float32))
        rates = rates.index_copy(0, second, self.rates.view(torch.float32))
        angle = positions[..., None].float() * (-rates if back else rates)
        angle = angle.to(torch.promote_types(keys.dtype, torch.float32))
        cos, sin = (f(angle).unsqueeze(1).to(keys.dtype) for f in (torch.cos, torch.sin))
        return torch.addcmul(keys * cos, keys.index_select(-1, partner), sin)

    def encode(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and values at these positions."""
        keys = self.keys.coordinates(self.turn(key, positions, back=True))
        return self.keys.rows(keys), self.values.rows(self.values.coordinates(value))

    def decode_keys(self, rows: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys as queries meet them, (b, g, t, d)."""
        return self.turn(self.keys.states(self.keys.read(rows, dtype), self.spec.key_heads), positions)

    def decode_values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.values.states(self.values.read(rows, dtype), self.spec.key_heads)

    def simulate(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they would come back from the cache."""
        keys = self.keys.coordinates(self.turn(key, positions, back=True))
        values = self.values.coordinates(value)
        if self.rounds:
            keys, values = self.keys.rounded(keys), self.values.rounded(values)
        heads = self.spec.key_heads
        return self.turn(self.keys.states(keys, heads), positions), self.values.states(values, heads)


@dataclass
class Call:
    """One call of an attention module: its mask, and what its cache did with the new tokens."""

    mask: Tensor | None
    layer: CodedLayer | None = None
    key: Tensor | None = None  # of the new tokens
    value: Tensor | None = None
    past: Any = 0  # tokens before them: a number, or a tensor of a static cache


class CodedLayer(CacheLayerMixin):
    """A cache layer that stores rows of bytes in another one, and beside it the first tokens of every sequence.

    `start` is the place of the first token that is no padding; positions count from there.
    """

    def __init__(self, inner: CacheLayerMixin, coder: Coder) -> None:
        self.inner, self.coder = inner, coder
        self.forget()

    def forget(self) -> None:
        self.start: Tensor | None = None
        self.started: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None  # keys and values, (b, g, first, d)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "coder"):  # before they are set, as while copying
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedLayer:
        """A copy of a cache, as of a prompt that many texts begin with, is for the same model."""
        twin = CodedLayer(copy.deepcopy(self.inner, memo), self.coder)
        memo[id(self)] = twin
        twin.start, twin.started, twin.first = copy.deepcopy((self.start, self.started, self.first), memo)
        return twin

    @property
    def is_compileable(self) -> bool:
        return self.inner.is_compileable

    @property
    def is_croppable(self) -> bool:
        return self.inner.is_croppable

    @property
    def keys(self) -> Any:
        return self.inner.keys

    @property
    def values(self) -> Any:
        return self.inner.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = [
            key_states.new_zeros(len(key_states), 1, key_states.shape[2], side.row_bytes, dtype=torch.uint8)
            for side in (self.coder.spec.keys, self.coder.spec.values)
        ]
        self.inner.lazy_initialization(*rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Encode and store new keys and values; what is returned are the rows of all tokens."""
        past = self.inner.get_seq_length()
        past = past.clone() if isinstance(past, Tensor) else past  # a static layer goes on counting in it
        call = self.coder.call
        self.note(key_states, value_states, past, None if call is None else call.mask)
        new = past + torch.arange(key_states.shape[2], device=key_states.device)
        rows = self.coder.encode(key_states, value_states, new - self.origin)
        if call is not None:
            call.layer, call.key, call.value, call.past = self, key_states, value_states, past
        return self.inner.update(*rows, *args, **kwargs)

    @property
    def origin(self) -> Tensor:
        assert self.start is not None
        return self.start[:, None]

    def note(self, key: Tensor, value: Tensor, past: Any, mask: Tensor | None) -> None:
        """Find where every sequence starts, and keep its first tokens."""
        batch, new, device = len(key), key.shape[2], key.device
        if self.start is None or self.started is None or self.first is None:
            self.start = torch.zeros(batch, dtype=torch.long, device=device)
            self.started = torch.zeros(batch, dtype=torch.bool, device=device)
            first = self.coder.spec.first
            self.first = tuple(x.new_zeros(batch, x.shape[1], first, x.shape[-1]) for x in (key, value))  # type: ignore[assignment]
        real = real_tokens(mask, batch, new, past, device)
        here = past + torch.where(real.any(1), real.int().argmax(1), new)
        self.start = torch.where(self.started, self.start, here)
        self.started = self.started | real.any(1)
        assert self.first is not None
        at = self.start[:, None] + torch.arange(self.coder.spec.first, device=device) - past  # b first
        known = ((at >= 0) & (at < new))[:, None, :, None]
        at = at.clamp(0, new - 1)[:, None, :, None]
        self.first = tuple(  # type: ignore[assignment]
            torch.where(known, x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[-1])), old)
            for x, old in zip((key, value), self.first, strict=True)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.inner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.inner.get_seq_length()

    def get_max_length(self) -> int:
        return self.inner.get_max_length()

    def offload(self) -> None:
        self.inner.offload()

    def prefetch(self) -> None:
        self.inner.prefetch()

    def reset(self) -> None:
        self.inner.reset()
        self.forget()

    def crop(self, tokens_to_remove: int) -> None:
        self.inner.crop(tokens_to_remove)  # first tokens that were cropped are written again before they are read
        if self.start is not None and self.started is not None:
            self.started = self.started & (self.start < self.inner.get_seq_length())

    def select(self, batch: Tensor) -> None:
        """Keep these rows of a batch."""
        if self.start is not None and self.started is not None and self.first is not None:
            batch = batch.to(self.start.device)
            self.start, self.started = self.start[batch], self.started[batch]
            self.first = (self.first[0][batch], self.first[1][batch])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.inner.reorder_cache(beam_idx)
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.inner.batch_repeat_interleave(repeats)
        if self.start is not None:
            self.select(torch.arange(len(self.start), device=self.start.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.inner.batch_select_indices(indices)
        self.select(indices)


def real_tokens(mask: Tensor | None, batch: int, new: int, past: Any, device: torch.device) -> Tensor:
    """Which new tokens are no padding, (b, t): those that see themselves."""
    if mask is None or mask.ndim != 4:
        return torch.ones(batch, new, dtype=torch.bool, device=device)
    rows = torch.arange(new, device=device)
    seen = mask[:, 0].expand(batch, -1, -1)
    columns = (rows + past).clamp(max=seen.shape[-1] - 1) if seen.shape[-1] > new else rows
    own = seen[:, rows, columns]
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2


class CodedCache:
    """A cache that is given keys and values and stores codes."""

    def __init__(self, cache: Any, coder: Coder) -> None:
        self._cache, self._coder = cache, coder

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layers = self._cache.layers
        while len(layers) <= layer_idx:
            layers.append((self._cache.layer_class_to_replicate or DynamicLayer)())
        layer = layers[layer_idx]
        if not isinstance(layer, CodedLayer) or layer.coder is not self._coder:
            layers[layer_idx] = coded_layer(layer, self._coder)
        return self._cache.update(key_states, value_states, layer_idx, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        return CodedCache(value, self._coder) if isinstance(value, Cache) else value

    def __len__(self) -> int:
        return len(self._cache)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the model's code asks what kind of cache it has
        return type(self.__dict__.get("_cache", self))  # torch.compile asks before there is one


def coded_layer(layer: Any, coder: Coder) -> CodedLayer:
    """A layer of a cache as one that stores codes of this coder; ValueError where another model has written to it."""
    if isinstance(layer, CodedLayer):
        if not layer.coder.is_like(coder):
            raise ValueError(
                "found a cache that holds codes of another model; expected one of this model, or a new one"
            )
        layer.coder = coder
        return layer
    if any("Quantized" in kind.__name__ for kind in type(layer).__mro__):
        raise ValueError(
            f"found a {type(layer).__name__}; expected a plain cache: this model's is made of codes already"
        )
    if layer.is_initialized:
        if int(layer.get_seq_length()):
            raise ValueError("found a cache that holds keys of another model; expected one of this model, or a new one")
        layer.is_initialized = False  # memory was taken early, for keys in place of codes
    return CodedLayer(layer, coder)


def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every cache that an attention module is called with stores codes."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = next((a for a in args if isinstance(a, Tensor) and a.ndim == 4), None)
    module.coder.call = Call(mask if isinstance(mask, Tensor) else None)

    def wrapped(value: Any) -> Any:
        plain = isinstance(value, Cache) and type(value) is not CodedCache
        return CodedCache(value, module.coder) if plain else value

    return tuple(wrapped(a) for a in args), {n: wrapped(v) for n, v in kwargs.items()}


def coded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention, on rows of bytes where the module has a coder."""
    how = how_of(module, query, attention_mask, given)
    coder: Coder | None = getattr(module, "coder", None)
    if coder is None:
        return attention(query, key, value, **how).transpose(1, 2).contiguous(), None
    how["scaling"] = coder.spec.d_qk**-0.5 if how["scaling"] is None else how["scaling"]
    call, coder.call = coder.call, None
    if key.dtype != torch.uint8:
        out = as_if_decoded(coder, query, key, value, how)
    else:
        out = on_rows(coder, call, query, (key, value), how)
    return out.transpose(1, 2).contiguous(), None


def as_if_decoded(coder: Coder, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
    """Attention without a cache: every query sees itself and the first tokens as they are, and codes of the others."""
    batch, new = len(key), key.shape[2]
    real = real_tokens(how["mask"], batch, new, 0, key.device)
    start = torch.where(real.any(1), real.int().argmax(1), 0)
    places = torch.arange(new, device=key.device)
    coded_key, coded_value = coder.simulate(key, value, places - start[:, None])
    exempt = (places - start[:, None] < coder.spec.first)[:, None, :, None]  # padding before the start is never seen
    coded_key, coded_value = torch.where(exempt, key, coded_key), torch.where(exempt, value, coded_value)
    return with_own_token(query, (key, value), (coded_key, coded_value), how)


def with_own_token(
    query: Tensor, exact: tuple[Tensor, Tensor], coded: tuple[Tensor, Tensor], how: dict[str, Any]
) -> Tensor:
    """softmax(QKᵀ)V where on the diagonal keys and values are exact, and coded elsewhere."""
    groups = query.shape[1] // coded[0].shape[1]
    (key, value), (coded_key, coded_value) = ([x.repeat_interleave(groups, 1) for x in pair] for pair in (exact, coded))
    scores = (query @ coded_key.transpose(-1, -2)).diagonal_scatter((query * key).sum(-1), dim1=-2, dim2=-1)
    weights = softmax(scores, how)
    own = weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return weights @ coded_value + own * (value - coded_value)


def softmax(scores: Tensor, how: dict[str, Any]) -> Tensor:
    """Weights from products of queries and keys: scaled, capped, masked."""
    scores = scores * how["scaling"]
    if how["softcap"] is not None:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    if how["causal"]:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
    mask = how["mask"]
    if mask is not None:
        least = torch.finfo(scores.dtype).min  # a row that sees nothing, as padding does, must not become NaN
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return F.dropout(weights, how["dropout"]) if how["dropout"] else weights


def on_rows(coder: Coder, call: Call | None, query: Tensor, rows: tuple[Tensor, Tensor], how: dict[str, Any]) -> Tensor:
    """Attention on the rows of a cache, in which the tokens of this call are the last."""
    if call is None or call.layer is None or call.key is None or call.value is None:
        raise NotImplementedError("attention on codes that another layer has cached, which coded caches do not know")
    new = call.key.shape[2]
    if isinstance(call.past, int) and call.past == 0:  # nothing is read from the cache
        mask = how["mask"]
        return attention(query, call.key, call.value, **{**how, "mask": None if mask is None else mask[..., :new]})
    layer = call.layer
    assert layer.start is not None and layer.first is not None
    keys, values = rows
    places = torch.arange(keys.shape[2], device=keys.device)
    total = call.past + new
    away = torch.as_tensor(total - keys.shape[2], device=keys.device).clamp(min=0)  # tokens that left a sliding window
    fresh = call.past - away + torch.arange(new, device=keys.device)
    key = coder.decode_keys(keys, places + away - layer.origin, query.dtype)
    key = key.index_copy_(2, fresh, call.key.to(key.dtype))
    key = with_first(key, layer, layer.first[0], away)
    if query.shape[2] == 1:
        return of_one_token(coder, query, key, values, (layer, call.value, fresh, away), how)
    value = coder.decode_values(values, query.dtype)
    value = value.index_copy_(2, fresh, call.value.to(value.dtype))
    return attention(query, key, with_first(value, layer, layer.first[1], away), **how)


def of_one_token(
    coder: Coder,
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    exact: tuple[CodedLayer, Tensor, Tensor, Tensor],
    how: dict[str, Any],
) -> Tensor:
    """Attention of one query: it gathers the coordinates of values, and makes one vector of what was gathered.

    `exact` is the layer, the value and the row of the new token, and how many tokens have left the window.
    """
    layer, value, fresh, away = exact
    assert layer.first is not None
    batch, heads = query.shape[:2]
    shared = query.reshape(batch, key.shape[1], -1, query.shape[-1])  # the query heads of a key head as rows
    weights = softmax((shared @ key.transpose(-1, -2)).view(batch, heads, 1, -1), how)
    at, known = first_rows(layer, layer.first[1], away, rows.shape[2])
    known = known & (at != fresh)
    at = torch.cat([at, fresh.expand(batch, 1)], 1)[:, None, None]  # b 1 1 exact
    known = torch.cat([known, torch.ones_like(known[:, :1])], 1)[:, None, None]
    own = weights.gather(3, at.expand(-1, heads, -1, -1)) * known
    coded = weights.scatter(3, at.expand(-1, heads, -1, -1), weights.gather(3, at.expand(-1, heads, -1, -1)) * ~known)
    kept = torch.cat([layer.first[1].to(value.dtype), value], 2).repeat_interleave(heads // value.shape[1], 1)
    return coder.values.gathered(coded, rows, value.shape[1]) + own @ kept.to(own.dtype)


def first_rows(layer: CodedLayer, first: Tensor, away: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The rows of the first tokens of every sequence, (b, first), and which of them are still there."""
    at = layer.origin + torch.arange(first.shape[2], device=first.device) - away
    return at.clamp(0, rows - 1), (at >= 0) & (at < rows)


def with_first(states: Tensor, layer: CodedLayer, first: Tensor, away: Tensor) -> Tensor:
    """Keys or values of all rows, with the first tokens of every sequence as they were."""
    if not first.shape[2]:
        return states
    at, known = first_rows(layer, first, away, states.shape[2])
    at = at[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1])
    kept = torch.where(known[:, None, :, None], first.to(states.dtype), states.gather(2, at))
    return states.scatter_(2, at, kept)


def install_caches(model: Any, specs: dict[str, CacheSpec]) -> None:
    """Give every attention module that the checkpoint describes its coder."""
    AttentionInterface.register(NAME, coded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for path, spec in specs.items():
        module = model.get_submodule(path)
        module.coder = Coder(spec)
        module.register_forward_pre_hook(before, with_kwargs=True)
    model.set_attn_implementation(NAME)
