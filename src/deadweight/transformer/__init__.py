"""One readable transformer of any shape, and its Hugging Face face.

`shape` needs neither torch nor transformers. The config and the models are imported when they are first used, and the
Auto classes of transformers know them from then on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from deadweight.transformer.shape import LayerShape, TransformerShape

if TYPE_CHECKING:
    from deadweight.transformer.auto import (
        TransformerConfig,
        TransformerForCausalLM,
        TransformerForMaskedLM,
        TransformerModel,
    )

__all__ = [
    "LayerShape",
    "TransformerConfig",
    "TransformerForCausalLM",
    "TransformerForMaskedLM",
    "TransformerModel",
    "TransformerShape",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("deadweight.transformer.auto"), name)
