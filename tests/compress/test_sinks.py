"""Attention sinks (gpt-oss): caches are coded, smaller heads are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from deadweight.compress.run import compress
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CodedLayer
from deadweight.slim.coder import Coder

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {  # as gpt-oss has it: cosines and sines are scaled too
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def model_with_sinks(rope: dict[str, Any]) -> Any:
    """One layer with a sliding window and one without; large sinks, which take much of the softmax."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=99,
        num_local_experts=2,  # both are used: rounding must not choose another one
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=256,
        rope_parameters=rope,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    model.set_experts_implementation("eager")  # the grouped product does not know float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2.0)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, 99, (8, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_without_rounding_a_model_with_sinks_stays_the_same(rope: dict[str, Any]) -> None:
    """In float64; transformers computes the frequencies of rotary positions in float32, for both alike."""
    model = model_with_sinks(rope).double()
    small: Any = compress(model, inputs={"input_ids": ids()}, keep_kv=1.0).module
    tokens = ids()[:3]
    with torch.no_grad():
        wanted, rounded = model(tokens).logits, small(tokens, use_cache=False).logits
        for part in small.modules():
            if isinstance(part, Coder):
                part.rounds = False
        exact = small(tokens, use_cache=False).logits
        for layer in small.model.layers:
            layer.self_attn.sinks.zero_()
        without = small(tokens, use_cache=False).logits
    size = float(wanted.abs().max())
    assert float((wanted - exact).abs().max()) < 1e-8 * size
    assert 1e-8 * size < float((wanted - rounded).abs().max()) < 0.1 * size, "rounding is what is left out"
    assert float((wanted - without).abs().max()) > 1e-3 * size, "sinks matter"


def test_a_model_with_sinks_decodes_to_what_was_judged() -> None:
    """Beyond the sliding window, token by token."""
    small: Any = compress(model_with_sinks(PLAIN), inputs={"input_ids": ids()}, keep_kv=0.4).module
    tokens = ids()[:2, :20]
    with torch.no_grad():
        whole = small(tokens, use_cache=False).logits
        cache = DynamicCache(config=small.config)
        steps = [small(token, past_key_values=cache, use_cache=True).logits for token in tokens.split(1, 1)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4 * float(whole.abs().max()))
    assert all(isinstance(layer, CodedLayer) for layer in cache.layers)


def test_smaller_heads_refuse_sinks() -> None:
    """Weights that do not add up to 1 would leave out a part of the means of dropped values."""
    with pytest.raises(DeadweightError, match="attention with s_aux, which compressed heads do not support"):
        compress(model_with_sinks(PLAIN), inputs={"input_ids": ids()}, keep_attention=0.5)
