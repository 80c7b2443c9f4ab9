"""A coded cache whose model reads decoded states from it, with its own code.

Some models do not cache the keys and values that attention reads: latent attention caches a latent and one rotary key,
and makes the keys and values of all heads from them. Others compute attention themselves, with biases of their own. The
cache of such a model stores codes like any other, but gives back the states of all tokens: those of the current call
and the first of a sequence as they are, the others decoded. What the model does with them is its own business.

In a call without a cache, each query shall see its own token exactly and the codes of all others. Then a stand-in for
the cache gives back every token twice, first decoded and then exact. Attention takes the diagonal from the second half.
If it is the model's own, masks and biases are doubled too: they hide the diagonal of the first half, and everything but
the diagonal of the second.

Cross-attention caches the tokens of an encoder, once. All queries read them decoded, with a cache and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache import CURRENT, Call, CodedCache, CodedLayer, before
from .coded_attention import as_if_cached, with_first, with_new
from .coder import Coder

CACHE_ARGUMENTS = ("past_key_values", "layer_past", "past_key_value")  # by which attention modules are given a cache
BIAS = "alibi"  # an argument with one number for every key, on the last axis
CROSS = "key_value_states"  # the argument by which cross-attention is given the output of an encoder
States = tuple[Tensor, Tensor]


class Form(Protocol):
    """How a model arranges what it caches: see `CacheSpec`."""

    @property
    def rotated_second(self) -> bool: ...

    @property
    def copies(self) -> int: ...


def arrange(form: Form, first: Tensor, second: Tensor) -> States:
    """The two tensors that a model caches, as keys and values: that with rotary positions first, no head twice."""
    key, value = (second, first) if form.rotated_second else (first, second)
    return key[:, :: form.copies], value[:, :: form.copies]


def arrange_back(form: Form, key: Tensor, value: Tensor) -> States:
    """Keys and values as the model caches them."""
    if form.copies > 1:
        key, value = (x.repeat_interleave(form.copies, 1) for x in (key, value))
    return (value, key) if form.rotated_second else (key, value)


def unpaired(coder: Coder, keys: Tensor) -> Tensor:
    """Keys whose dimensions are in the order of `Coder.paired`, in the model's order."""
    return keys.index_select(-1, coder.order.argsort()) if coder.spec.pairs else keys


class DecodedCache(CodedCache):
    """A cache that takes and gives states, and stores codes."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> States:
        coder = self._coder
        states = arrange(coder.spec, key_states, value_states)
        rows = super().update(*states, layer_idx, *args, **kwargs)
        call = CURRENT.of(coder)
        assert call is not None, "a coded cache outside its attention"
        return arrange_back(coder.spec, *read_states(call, rows))

    @property
    def layers(self) -> list[Any]:
        """The layers, of which cross-attention reads keys and values itself once they are cached."""
        return [DecodedLayer(layer) if isinstance(layer, CodedLayer) else layer for layer in self._cache.layers]


class DecodedLayer:
    """A layer of a coded cache whose keys and values are decoded."""

    def __init__(self, layer: CodedLayer) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def keys(self) -> Tensor:
        return self.states()[0]

    @property
    def values(self) -> Tensor:
        return self.states()[1]

    def states(self) -> States:
        """Decoded once in a call: keys and values are read one after the other."""
        layer, coder = self._layer, self._layer.coder
        call = CURRENT.of(coder)
        assert call is not None, "a coded cache outside its attention"
        if call.read is None:
            call.layer, like = layer, layer.first
            assert like is not None
            call.read = arrange_back(coder.spec, *all_decoded(layer, (layer.keys, layer.values), like[0].dtype))
        return call.read


def all_decoded(layer: CodedLayer, rows: States, dtype: torch.dtype) -> States:
    """The states of all rows of a cache, the first of a sequence exactly, the others decoded."""
    coder, (units, exponents) = layer.coder, rows
    assert layer.first is not None
    codes, away = coder.read(units, exponents, dtype), torch.zeros((), dtype=torch.long, device=units.device)
    keys = coder.keys_of(codes, torch.arange(units.shape[2], device=units.device) - layer.origin)
    keys = with_first(keys, layer, coder.paired(layer.first[0]), away)
    return unpaired(coder, keys), with_first(coder.values_of(codes), layer, layer.first[1], away)


def read_states(call: Call, rows: States) -> States:
    """The states of all rows of a cache, in which the tokens of this call are the last."""
    coder, layer, key, value = call.coder, call.layer, call.key, call.value
    assert layer is not None and layer.first is not None and key is not None and value is not None
    units, exponents = rows
    if call.crosses:
        return all_decoded(layer, rows, key.dtype)
    if isinstance(call.past, int) and call.past == 0 and units.shape[2] == key.shape[2]:
        return key, value  # nothing is read from the cache
    places = torch.arange(units.shape[2], device=units.device)
    total = call.past + key.shape[2]
    away = torch.as_tensor(total - units.shape[2], device=units.device).clamp(min=0)  # tokens that left a window
    fresh = call.past - away + torch.arange(key.shape[2], device=units.device)
    codes = coder.read(units, exponents, key.dtype)
    keys = with_new(coder.keys_of(codes, places + away - layer.origin), fresh, coder.paired(key))
    values = with_new(coder.values_of(codes), fresh, value)
    keys = with_first(keys, layer, coder.paired(layer.first[0]), away)
    return unpaired(coder, keys), with_first(values, layer, layer.first[1], away)


class DoubledStates:
    """Stands in for a cache in a call without one: gives back every token twice, decoded and then exact."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, first: Tensor, second: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> States:
        call, coder = self.call, self.call.coder
        key, value = arrange(coder.spec, first, second)
        coder.expect_states(key, value)
        coded_key, coded_value = as_if_cached(coder, (key, value), call.mask, call.positions)
        if call.crosses:
            return arrange_back(coder.spec, unpaired(coder, coded_key), coded_value)
        call.doubled = True
        key = torch.cat([unpaired(coder, coded_key), key], 2)
        return arrange_back(coder.spec, key, torch.cat([coded_value, value], 2))


def cache_argument(module: Any) -> str:
    """The name of the argument by which a module is given its cache."""
    known = signature(type(module).forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in known), None)
    if name is None:
        raise NotImplementedError(f"a cache that {type(module).__name__} is given in an unknown way")
    return name


def before_states(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before an attention module: make its cache take and give states, and store codes."""
    new_args, new_kwargs = before(module, args, kwargs, DecodedCache)
    call = CURRENT.call
    assert call is not None
    if kwargs.get(CROSS) is not None:
        call.crosses, call.mask, call.positions = True, None, None  # the mask is of queries of other tokens
    if any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
        return new_args, new_kwargs
    kwargs = {**kwargs, cache_argument(module): DoubledStates(call)}
    own = module.coder.spec.reader == "own attention"
    return args, double_masks(kwargs, tokens_of(args, kwargs)) if own else kwargs


def after_states(module: Any, args: tuple[Any, ...], output: Any) -> None:
    """A hook after an attention module: forget its call."""
    CURRENT.call = None


def tokens_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden.shape[1]


def double_masks(kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Masks and biases for every key twice: of decoded ones all but the own token, of exact ones the own alone."""
    mask: Tensor | None = kwargs.get("attention_mask")
    own = torch.eye(tokens, dtype=torch.bool, device=None if mask is None else mask.device)
    if mask is None:
        mask = torch.ones_like(own).tril()[None, None]
    if mask.ndim != 4 or mask.shape[-2:] != own.shape:
        raise ValueError(f"found a mask of shape {tuple(mask.shape)}; expected one number for each query and key")
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    doubled = torch.cat([mask.masked_fill(own, hidden), mask.masked_fill(~own, hidden)], -1)
    bias = kwargs.get(BIAS)
    return {**kwargs, "attention_mask": doubled, **({} if bias is None else {BIAS: torch.cat([bias, bias], -1)})}
