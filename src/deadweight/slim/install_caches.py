"""Giving the attentions of a model their coded caches."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .cache import before
from .coded_attention import NAME, coded_attention
from .coder import Coder
from .decoded_states import after_states, before_states
from .format import CacheSpec


def install_caches(model: Any, specs: dict[str, CacheSpec]) -> None:
    """Give each attention module with a coded cache its coder.

    A model whose attention is not called through transformers' interface keeps its own.
    """
    AttentionInterface.register(NAME, coded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for path, spec in specs.items():
        module = model.get_submodule(path)
        module.coder = Coder(spec)
        module.register_forward_pre_hook(before if spec.reader == "codes" else before_states, with_kwargs=True)
        if spec.reader != "codes":
            module.register_forward_hook(after_states, always_call=True)
    if any(spec.reader != "own attention" for spec in specs.values()):
        model.set_attn_implementation(NAME)
