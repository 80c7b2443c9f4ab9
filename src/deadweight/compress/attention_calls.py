"""Observing the attention of a running model, through the interface by which transformers calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.slim.attention import BIAS, AttentionOptions, attend, choose, offer, options_of, use

OBSERVED = "deadweight-observed"


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention: the path of its module, and its inputs."""

    path: str
    query: Tensor  # (b, heads, t, d_qk)
    key: Tensor
    value: Tensor
    options: AttentionOptions

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The outputs of the heads for these queries, keys and values, (b, heads, t, d_v)."""
        return attend(query, key, value, self.options)


# Called at every attention; returns the outputs of the heads. One with `knows_sinks` may be given attention with sinks,
# or with a bias for every query and key.
Observer = Callable[[AttentionCall], Tensor]
# A context in which an observer is called at every attention of a model.
Watch = Callable[[Any, Observer], AbstractContextManager[None]]


_observer: ContextVar[tuple[Observer, dict[int, str]] | None] = ContextVar("observer", default=None)


def observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    options = options_of(module, query, attention_mask, given)
    options = options.with_scale(options.scale_of(query))
    observation = _observer.get()
    assert observation is not None, "observed attention without an observer"
    observer, paths = observation
    strange = [name for name in ("s_aux", BIAS) if given.get(name) is not None]
    if strange and not getattr(observer, "knows_sinks", False):
        raise NotImplementedError(f"attention with {strange[0]}, which compressed heads do not support")
    out = observer(AttentionCall(paths[id(module)], query, key, value, options))
    return out.transpose(1, 2).contiguous(), None


def reaches_attention(model: Any) -> bool:
    """Whether the attention of a model is called through transformers' interface."""
    return hasattr(model, "set_attn_implementation") and bool(type(model)._can_set_attn_implementation())


@contextmanager
def observing(model: Any, observer: Observer) -> Iterator[None]:
    """A context in which every attention call of the model goes through the observer."""
    if not reaches_attention(model):
        raise DeadweightError(
            f"found a {type(model).__name__}; expected a model of transformers with softmax attention that is called "
            "through its attention interface: heads are measured there"
        )
    offer(OBSERVED, observed_attention)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs]
    token = _observer.set((observer, {id(m): path for path, m in model.named_modules()}))
    try:
        choose(model, OBSERVED)
        yield
    finally:
        _observer.reset(token)
        for config, name in before:
            config._attn_implementation = name


def use_default_attention(model: Any) -> None:
    """Give a model that computes attention by itself the implementation that it will be loaded with.

    Falcon with ALiBi computes another function with the eager one: it adds the bias twice.
    """
    model.config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def use_our_attention(model: Any) -> None:
    """Compute attention with the code of compressed heads, so that two models differ in their heads alone.

    It is also faster than eager attention, and as exact. Call it only for models whose attention was observed.
    """
    use(model)
