"""Looking into attention while a model runs, through the one interface by which transformers calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deadweight.errors import DeadweightError
from deadweight.slim.attention import NAME, options_of, register
from deadweight.slim.attention import attend as attend_with

OBSERVED = "deadweight-observed"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Observer(Protocol):
    """Called at every attention with what it is given; returns the outputs of the heads, (b, h, t, d_v).

    `how` holds mask, scaling, causal, dropout and softcap; `attend` computes the attention itself.
    """

    def __call__(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, attend: Attend, how: dict[str, Any]
    ) -> Tensor: ...


_observer: ContextVar[tuple[Observer, dict[int, str]] | None] = ContextVar("observer", default=None)


def observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    options = options_of(module, query, attention_mask, given)
    options = options._replace(scaling=options.scale_of(query))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_with(q, k, v, options)

    observation = _observer.get()
    assert observation is not None, "observed attention without an observer"
    observer, paths = observation
    out = observer(paths[id(module)], query, key, value, attend, options._asdict())
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def observing(model: Any, observer: Observer) -> Iterator[None]:
    """Every attention of the model passes through the observer inside this block."""
    if not hasattr(model, "set_attn_implementation") or not type(model)._can_set_attn_implementation():
        raise DeadweightError(
            f"found a {type(model).__name__}; expected a model of transformers with softmax attention that is called "
            "through its attention interface: only there can heads be looked into"
        )
    AttentionInterface.register(OBSERVED, observed_attention)
    AttentionMaskInterface.register(OBSERVED, sdpa_mask)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs]
    token = _observer.set((observer, {id(m): path for path, m in model.named_modules()}))
    try:
        model.set_attn_implementation(OBSERVED)
        yield
    finally:
        _observer.reset(token)
        for config, name in before:
            config._attn_implementation = name


def attend_alike(model: Any) -> None:
    """From now on its attention is computed by the code of compressed heads: what then differs is the heads alone.

    It is also faster than attention that is spelled out, and as exact. For models that were observed.
    """
    register()
    model.set_attn_implementation(NAME)
