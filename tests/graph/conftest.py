"""Hugging Face models of width 8, made from their configs: nothing here needs the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

TOKENS = torch.tensor([[1, 4, 2, 8, 5], [7, 0, 3, 9, 6]])


def configs(layers: int) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    t = transformers
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 8, "attn_implementation": "eager"}
    gpt2 = {"n_embd": 8, "n_head": 2, "n_layer": layers, "vocab_size": 11, "n_positions": 8, "n_inner": 12}
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": layers, "num_heads": 2, "vocab_size": 11}
    vit = {k: v for k, v in sizes.items() if k not in ("vocab_size", "max_position_embeddings")}
    gemma = sizes | {"num_key_value_heads": 1, "head_dim": 4, "sliding_window": 3, "pad_token_id": 0}
    tokens = {"input_ids": TOKENS}
    return {
        "gpt2": lambda: (t.GPT2LMHeadModel(t.GPT2Config(**gpt2, use_cache=False, attn_implementation="eager")), tokens),
        "llama": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_key_value_heads=1, use_cache=False)), tokens),
        "bert": lambda: (t.BertModel(t.BertConfig(**sizes), add_pooling_layer=False), tokens),
        "gemma2": lambda: (t.Gemma2ForCausalLM(t.Gemma2Config(**gemma, use_cache=False)), tokens),
        "t5": lambda: (
            t.T5Model(t.T5Config(**t5, use_cache=False)),
            {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :3]},
        ),
        "vit": lambda: (
            t.ViTModel(t.ViTConfig(**vit, image_size=8, patch_size=4), add_pooling_layer=False),
            {"pixel_values": torch.randn(2, 3, 8, 8)},
        ),
    }


@pytest.fixture
def build() -> Callable[..., tuple[nn.Module, dict[str, Any]]]:
    """A randomly initialised model in eval mode, and keyword inputs for it."""

    def make(name: str, layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        module, inputs = configs(layers)[name]()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape) + (parameter.ndim == 1))
        return module.eval(), inputs

    return make
