"""Observing what a model writes to its cache and reads from it.

This is for models whose attention does not read its cache as it is: latent attention caches a latent from which keys
and values are made, and some models call no attention interface. Each module that writes to the cache is given a
stand-in, which hands the two written tensors to an observer, as an `AttentionCall`, and gives back what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from deadweight.compress.attention_calls import AttentionCall, Observer, observing, reaches_attention
from deadweight.compress.cache_support import FAILURES, Given
from deadweight.compress.locate import (
    CachedForm,
    ForwardRecord,
    Heads,
    Seen,
    find_rows,
    heads_of,
    is_never_rotated,
    record_runs,
)
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.slim.attention import AttentionOptions
from deadweight.slim.decoded_states import States, arrange, arrange_back, cache_argument
from deadweight.source.model import Source
from deadweight.source.printable import printable, reason

Forms = Mapping[str, CachedForm]  # by the path of the module that writes to the cache


@dataclass(frozen=True)
class CacheCall(AttentionCall):
    """What one module writes to its cache; `attend` gives what it reads."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, (key, value))


class TappedCache:
    """Stands in for an empty cache, and hands what is written to it to an observer."""

    def __init__(self, path: str, form: CachedForm, observer: Observer) -> None:
        self.path, self.form, self.observer = path, form, observer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, first: Tensor, second: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> States:
        key, value = arrange(self.form, first, second)
        read: Any = self.observer(CacheCall(self.path, key, key, value, AttentionOptions()))
        return arrange_back(self.form, *read)


@contextmanager
def expecting_states(name: str) -> Iterator[None]:
    """A context in which a model's code that cannot work with what it is given in place of its cache is refused."""
    try:
        yield
    except DeadweightError:
        raise
    except (*FAILURES, NotImplementedError) as error:
        raise DeadweightError(
            f"{printable(name)} does not compute with decoded states in place of its cache ({reason(error)}): its "
            "cache cannot be coded"
        ) from error


@contextmanager
def tapping(model: nn.Module, observer: Observer, *, forms: Forms) -> Iterator[None]:
    """A context in which everything that the model writes to its cache goes through the observer."""

    def give(module: Any, args: Any, kwargs: dict[str, Any], path: str) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, cache_argument(module): TappedCache(path, forms[path], observer)}

    with ExitStack() as stack:
        for path in forms:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(give, path=path), with_kwargs=True)
            stack.callback(hook.remove)
        yield


class CacheRecord(ForwardRecord):
    """What is written to the cache in one forward pass, with the outputs of the layers before."""

    def __call__(self, call: AttentionCall) -> Tensor:
        key, value = call.key.cpu(), call.value.cpu()
        self.seen.setdefault(call.path, Seen(key, key, value, key, self.layers))
        self.layers = {}
        return call.attend(call.query, call.key, call.value)


class WatchedCache(DynamicCache):
    """A cache that notes which module writes to which of its layers."""

    def __init__(self, config: Any, running: list[str]) -> None:
        super().__init__(config=config)
        self.running = running  # paths of the modules that are being called
        self.writers: list[tuple[str, int]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.writers.append((self.running[-1], layer_idx))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@contextmanager
def following_calls(model: nn.Module, running: list[str]) -> Iterator[None]:
    """A context in which `running` lists the paths of the modules that are being called, the innermost last."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda m, a, path=path: running.append(path))
            leave = module.register_forward_hook(lambda m, a, out: (running.pop(), None)[1], always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


@torch.no_grad()
def find_writers(source: Source) -> list[str]:
    """The modules that write to the cache, in order; raises unless each has a layer of its own that holds it all."""
    name, model, running = printable(source.name), source.module, list[str]()
    caches = [WatchedCache(source.config, running)]
    if getattr(source.config, "is_encoder_decoder", False):
        caches.append(WatchedCache(source.config, running))
    cache = EncoderDecoderCache(*caches) if len(caches) > 1 else caches[0]
    args, kwargs = source.inputs.on(device_of(model), float_of(model))
    try:
        with following_calls(model, running):
            model(*args, **{**kwargs, "use_cache": True, "past_key_values": cache})
    except FAILURES as error:
        raise DeadweightError(f"{name} does not run with a cache ({reason(error)}); expected one to code") from error
    return [path for own in caches for path in expect_plain_layers(own, name)]


def expect_plain_layers(cache: WatchedCache, name: str) -> list[str]:
    """The modules that write to a cache; raises unless each writes once, to a plain layer of its own."""
    paths, layers = [path for path, _ in cache.writers], [layer for _, layer in cache.writers]
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if not paths or kinds or len(set(paths)) < len(paths) or sorted(layers) != list(range(len(cache.layers))):
        strange = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DeadweightError(
            f"{name}: {len(set(paths))} modules write {len(paths)} times to a cache of {len(cache.layers)} layers"
            f"{f', some of them {strange}' if strange else ''}; expected one plain layer for each, written once: a "
            "cache of another kind cannot be coded"
        )
    return paths


def locate_cached(source: Source) -> tuple[Heads, ...]:
    """What every module writes to the cache, as heads of keys and values, in the order in which they are reached."""
    plain = {path: CachedForm() for path in find_writers(source)}
    with expecting_states(source.name):
        return locate_in(source, plain)


def locate_in(source: Source, plain: Forms) -> tuple[Heads, ...]:
    """The heads in caches whose forms are not known yet: first which tensor is rotated, then by which pairs."""
    near = record_runs(source, CacheRecord, far=False, watch=partial(tapping, forms=plain))
    read = numbers_read(source)
    forms = {
        path: replace(form_of(path, source.module, near), reached=path in read, expanded=read.get(path, 0))
        for path in plain
    }
    for run in near:
        for path, seen in run.seen.items():
            key, value = arrange(forms[path], seen.key, seen.value)
            run.seen[path] = replace(seen, query=key, key=key, value=value)
    far = record_runs(source, CacheRecord, far=True, watch=partial(tapping, forms=forms))
    return tuple(replace(heads_of(path, source.module, near, far), form=forms[path]) for path in forms)


def form_of(path: str, model: nn.Module, runs: list[ForwardRecord]) -> CachedForm:
    """Which of the two tensors has rotary positions, and how many equal copies there are of every head."""
    turned = [is_rotated(side, path, model, runs) for side in ("key", "value")]
    return CachedForm(turned == [False, True], copies_in([run.seen[path] for run in runs]))


def is_rotated(side: str, path: str, model: nn.Module, runs: list[ForwardRecord]) -> bool:
    rows = find_rows(side, path, model, runs)
    return rows is not None and not is_never_rotated(rows, side, path, runs)


def copies_in(seen: list[Seen]) -> int:
    """The largest number of neighbouring heads that are always equal, in both tensors."""
    heads = seen[0].key.shape[1]
    pairs = [(s.key, s.value) for s in seen]
    if any(value.shape[1] != heads for _, value in pairs):
        return 1
    return next(
        n
        for n in range(heads, 0, -1)
        if heads % n == 0 and all(torch.equal(x, x[:, ::n].repeat_interleave(n, 1)) for pair in pairs for x in pair)
    )


@torch.no_grad()
def numbers_read(source: Source) -> dict[str, int]:
    """The numbers per token that every attention reads, where transformers' attention interface reaches it."""
    if not reaches_attention(source.module):
        return {}
    given = Given()
    args, kwargs = source.inputs.on(device_of(source.module), float_of(source.module))
    with observing(source.module, given):
        source.module(*args, **kwargs)
    return {p: sum(x.shape[1] * x.shape[3] for x in states) for p, states in given.states.items()}
