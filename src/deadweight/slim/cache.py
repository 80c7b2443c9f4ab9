"""A coded key-value cache: rows of bytes for each token, in the cache layers of transformers.

It imports only torch and transformers, so that it can travel with the checkpoint. The model's code still sees keys and
values of their usual shape. What it passes to its cache is encoded (`coder.py`) and stored by a `CodedLayer`. That
wraps a cache layer of transformers (dynamic, static, sliding), which holds rows of units in place of keys and scales in
place of values. Attention reads both (`coded_attention.py`).
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .coder import Coder
from .cpu_encode import encode_on_cpu
from .kernels import encode_token, fitting


@dataclass
class Call:
    """One call of an attention module: its mask, and the new tokens in its cache."""

    coder: Coder
    mask: Tensor | None
    positions: Tensor | None = None  # of the new tokens, (b or 1, t), where the model says them
    layer: CodedLayer | None = None
    key: Tensor | None = None  # of the new tokens
    value: Tensor | None = None
    past: Any = 0  # tokens before them: a number, or a tensor of a static cache
    doubled: bool = False  # attention is given decoded and then exact states of the same tokens
    crosses: bool = False  # the cached tokens are those of an encoder
    read: tuple[Tensor, Tensor] | None = None  # states that were decoded in this call


class Current(threading.local):
    """The current call of an attention module, which transformers' attention interface does not pass on; per thread."""

    call: Call | None = None

    def of(self, coder: Coder) -> Call | None:
        return self.call if self.call is not None and self.call.coder is coder else None


CURRENT = Current()


class CodedLayer(CacheLayerMixin):
    """A cache layer that stores rows of bytes in another cache layer, and the first tokens of every sequence uncoded.

    `start` is the index of the first token that is not padding; positions are counted from there.
    """

    def __init__(self, inner: CacheLayerMixin, coder: Coder) -> None:
        self.inner, self.coder = inner, coder
        self.forget()

    def forget(self) -> None:
        self.start: Tensor | None = None
        self.zero: Tensor | None = None
        self.started: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None  # keys and values, (b, g, first, d)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "coder"):  # before they are set, for example during a copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedLayer:
        """A copy of a cache (of a shared prompt, for example) belongs to the same model."""
        twin = CodedLayer(copy.deepcopy(self.inner, memo), self.coder)
        memo[id(self)] = twin
        state = (self.start, self.zero, self.started, self.first)
        twin.start, twin.zero, twin.started, twin.first = copy.deepcopy(state, memo)
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
        spec = self.coder.spec
        rows = [
            key_states.new_zeros(len(key_states), spec.n_sets, key_states.shape[2], size, dtype=torch.uint8)
            for size in (2 * spec.n_units, 1)
        ]
        self.inner.lazy_initialization(*rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Encode and store new keys and values; returns the rows and scales of all tokens."""
        self.coder.expect_states(key_states, value_states)
        past = self.inner.get_seq_length()
        past = past.clone() if isinstance(past, Tensor) else past  # a static layer keeps counting in it
        call = CURRENT.of(self.coder)
        quick = key_states.device.type == "cpu" and not torch.compiler.is_compiling()
        if not quick or not self.is_settled(int(past)):
            self.note(key_states, value_states, past, call)
        rows = self.encode(key_states, value_states, past)
        if call is not None:
            call.layer, call.key, call.value, call.past = self, key_states, value_states, past
        return self.inner.update(*rows, *args, **kwargs)

    def encode(self, key: Tensor, value: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """Rows and exponents of new tokens that follow `past` others."""
        one, compiling = key.shape[2] == 1, torch.compiler.is_compiling()
        if one and key.device.type == "cpu" and not compiling and not torch.is_grad_enabled():
            assert self.zero is not None
            return encode_on_cpu(self.coder, key, value, [int(past) - zero for zero in self.zero.tolist()])
        new = past + torch.arange(key.shape[2], device=key.device) - self.origin
        if one and fitting(self.coder, key):
            return encode_token(self.coder.number, key, value, new)
        return self.coder.encode(key, value, new)

    def is_settled(self, past: int) -> bool:
        """Whether every sequence has started, and its first tokens are among those before: nothing is to be noted."""
        if self.start is None or self.started is None:
            return False
        return max(self.start.tolist()) + self.coder.spec.first <= past and all(self.started.tolist())

    @property
    def origin(self) -> Tensor:
        assert self.zero is not None
        return self.zero[:, None]

    def note(self, key: Tensor, value: Tensor, past: Any, call: Call | None) -> None:
        """Find where every sequence starts and where its positions count from, and keep its first tokens."""
        batch, new, device = len(key), key.shape[2], key.device
        if self.start is None or self.zero is None or self.started is None or self.first is None:
            self.start = self.zero = torch.zeros(batch, dtype=torch.long, device=device)
            self.started = torch.zeros(batch, dtype=torch.bool, device=device)
            first = self.coder.spec.first
            self.first = tuple(x.new_zeros(batch, x.shape[1], first, x.shape[-1]) for x in (key, value))  # type: ignore[assignment]
        real = real_tokens(None if call is None else call.mask, batch, new, past, device)
        local = torch.where(real.any(1), real.int().argmax(1), new)
        self.start = torch.where(self.started, self.start, past + local)
        position = position_of(None if call is None else call.positions, local, new)
        self.zero = torch.where(self.started, self.zero, past + local - position)
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
        if self.start is not None and self.zero is not None and self.started is not None and self.first is not None:
            batch = batch.to(self.start.device)
            self.start, self.zero, self.started = self.start[batch], self.zero[batch], self.started[batch]
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
    """Which new tokens are not padding, (b, t): those that attend to themselves, and that the next one attends to.

    A model may let padding attend to itself, so that no row of the mask is empty.
    """
    if mask is None or mask.ndim != 4:
        return torch.ones(batch, new, dtype=torch.bool, device=device)
    rows = torch.arange(new, device=device)
    seen = mask[:, 0].expand(batch, -1, -1)
    most = seen.shape[-1] - new  # columns before the new tokens, unless a static cache has room behind them
    columns = rows + (past.clamp(max=most) if isinstance(past, Tensor) else min(past, most))
    own = visible(seen[:, rows, columns])
    return torch.cat([own[:, :-1] & visible(seen[:, rows[1:], columns[:-1]]), own[:, -1:]], 1)


def visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def position_of(positions: Tensor | None, local: Tensor, new: int) -> Tensor:
    """The position of the first real token of every sequence, which is new token `local`; 0 if nothing says it."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != new:
        return torch.zeros_like(local)
    at = local.clamp(max=new - 1)[:, None]
    return positions.to(local).expand(len(local), -1).gather(1, at)[:, 0]


class CodedCache:
    """A cache that takes keys and values and stores codes."""

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
        return type(self)(value, self._coder) if isinstance(value, Cache) else value

    def __len__(self) -> int:
        return len(self._cache)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the model's code asks what kind of cache it has
        return type(self.__dict__.get("_cache", self))  # torch.compile asks before there is one


def coded_layer(layer: Any, coder: Coder) -> CodedLayer:
    """Wrap a cache layer to store codes of this coder; raises ValueError if another model has written to it."""
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
        layer.is_initialized = False  # its memory was allocated early, for keys instead of codes
    return CodedLayer(layer, coder)


def before(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[CodedCache] = CodedCache
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before an attention module: make its cache store codes."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = next((a for a in args if isinstance(a, Tensor) and a.ndim == 4), None)
    positions = kwargs.get("position_ids")
    mask, positions = (x if isinstance(x, Tensor) else None for x in (mask, positions))
    CURRENT.call = Call(module.coder, mask, positions)

    def wrapped(value: Any) -> Any:
        plain = isinstance(value, Cache) and not issubclass(type(value), CodedCache)
        return kind(value, module.coder) if plain else value

    return tuple(wrapped(a) for a in args), {n: wrapped(v) for n, v in kwargs.items()}
