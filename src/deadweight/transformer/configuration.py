"""The config of the transformer, as transformers reads and writes it.

This file, `shape.py` and `modeling.py` need transformers and torch alone, so that they can travel with a checkpoint.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import ClassVar, TypeAlias

from transformers import PretrainedConfig

from .shape import BIASES, TransformerShape, check

TokenId: TypeAlias = int | list[int] | None


class TransformerConfig(TransformerShape, PretrainedConfig):
    """A transformer of any shape, and what transformers wants to know besides."""

    model_type = "deadweight"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "context",
        "type_vocab_size": "token_types",
    }

    use_cache: bool = True
    bos_token_id: TokenId = None
    eos_token_id: TokenId = None
    pad_token_id: TokenId = None

    def __post_init__(self, **kwargs: object) -> None:
        fields = TransformerShape.__annotations__ | TransformerConfig.__annotations__
        for name in kwargs:
            if near := get_close_matches(name, fields, 1, 0.8):
                raise ValueError(f"found the unknown field {name}; expected {near[0]}")
        super().__post_init__(**kwargs)
        self.biases = sorted(self.biases, key=BIASES.index) if set(self.biases) <= set(BIASES) else self.biases
        check(self)
