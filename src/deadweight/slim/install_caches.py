"""Giving the attentions of a model their coded caches."""

from __future__ import annotations

from typing import Any

from .attention import choose, offer
from .cache import before
from .coded_attention import NAME, coded_attention
from .coder import Coder
from .decoded_states import after_states, before_states
from .format import CacheSpec


def install_caches(model: Any, specs: dict[str, CacheSpec]) -> None:
    """Give each attention module with a coded cache its coder.

    A model whose attention is not called through transformers' interface keeps its own.
    """
    offer(NAME, coded_attention)
    for path, spec in specs.items():
        module = model.get_submodule(path)
        module.coder = Coder(spec)
        module.register_forward_pre_hook(before if spec.reader == "codes" else before_states, with_kwargs=True)
        if spec.reader != "codes":
            module.register_forward_hook(after_states, always_call=True)
    if any(spec.reader != "own attention" for spec in specs.values()):
        choose(model, NAME)
