"""Shapes that cannot be built are refused with what was found, what was expected, and where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM

SMALL = {"d_model": 12, "n_layers": 2, "heads": 3}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"norm": "batch"}, "found norm = 'batch'; expected layer or rms or none"),
    ({"norm_place": "sandwich"}, "found norm_place = 'sandwich'; expected pre or post"),
    ({"positions": "rotery"}, "found positions = 'rotery'; expected learned or rotary or none"),
    ({"activation": "gelu_new"}, "found activation = 'gelu_new'; expected gelu or gelu_tanh or relu or swiglu"),
    ({"query": "Identity"}, "found query = 'Identity'; expected full or identity"),
    ({"value": ["full", "none"]}, "found value = 'none'; expected full or identity"),
    ({"biases": ["query", "keys"]}, "found biases with 'keys'; expected some of query, key, value, output"),
    ({"biases": "query"}, "found biases = 'query'; expected a list"),
    ({"n_layer": 3}, "found the unknown field n_layer; expected n_layers"),
    ({"key_head": 1}, "found the unknown field key_head; expected key_heads"),
    ({"heads": [3, 3, 3]}, "found heads for 3 layers; expected 2 values"),
    ({"d_qk": [4]}, "found d_qk for 1 layers; expected 2 values"),
    ({"query": ["identity"]}, "found query for 1 layers; expected 2 values"),
    ({"heads": 0}, "found heads = 0; expected whole numbers above zero"),
    ({"heads": None}, "found heads = None; expected whole numbers above zero"),
    ({"heads": 3.0}, "found heads = 3.0; expected whole numbers above zero"),
    ({"hidden": [8, -1]}, "found hidden = -1; expected whole numbers above zero"),
    ({"d_model": True}, "found d_model = True; expected a whole number above zero"),
    ({"n_layers": 0}, "found n_layers = 0; expected a whole number above zero"),
    ({"token_types": -1}, "found token_types = -1; expected a whole number, or zero for none"),
    ({"heads": 5}, "found layer 0: 5 heads for d_model = 12; expected a divisor of it, or d_qk given"),
    ({"heads": [3, 5]}, "found layer 1: 5 heads for d_model = 12; expected a divisor of it, or d_qk given"),
    ({"heads": 4, "key_heads": 3}, "found layer 0: 4 heads on 3 key heads; expected a multiple of the key heads"),
    ({"positions": "rotary", "d_qk": 3}, "found layer 0: rotary positions with d_qk = 3; expected an even d_qk"),
    (
        {"query": "identity", "d_qk": 6},
        "found layer 0: query = identity with 3 heads of 6; expected heads × size = d_model = 12",
    ),
    (
        {"value": ["full", "identity"], "d_v": 2},
        "found layer 1: value = identity with 3 heads of 2; expected heads × size = d_model = 12",
    ),
    (
        {"key": "identity", "key_heads": 1},
        "found layer 0: key = identity with 1 heads of 4 (grouped keys: 3 query heads share 1); expected heads × size",
    ),
    ({"shared_layers": True, "hidden": [8, 9]}, "found shared_layers with layers of different shapes; expected one"),
    ({"scale": 0.0}, "found scale = 0.0; expected a number above zero, or none for 1/√d_qk"),
    ({"scale": float("inf")}, "found scale = inf; expected a number above zero"),
    ({"norm_eps": -1e-5}, "found norm_eps = -1e-05; expected a number, zero or above"),
    ({"rotary_base": 0.0}, "found rotary_base = 0.0; expected a number above zero"),
    ({"init_std": -0.1}, "found init_std = -0.1; expected a number, zero or above"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE, ids=[m[6:40] for _, m in IMPOSSIBLE])
def test_an_impossible_shape_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig(**SMALL | changes)


POSSIBLE: list[dict[str, Any]] = [
    {"heads": 5, "d_qk": 2},
    {"heads": [3, 4]},
    {"heads": 4, "key_heads": 2},
    {"positions": "rotary", "d_qk": 2},
    {"query": "identity"},
    {"query": "identity", "key_heads": 1},
    {"value": "identity", "d_qk": 2, "d_v": 4},
    {"query": "identity", "key": "identity", "value": "identity"},
    {"key": "identity", "key_heads": 1, "d_qk": 12},
    {"shared_layers": True, "hidden": [8, 8]},
    {"scale": 1.0},
    {"num_hidden_layers": 1},
    {"my_own_note": "kept, as transformers keeps what it does not know"},
]


@pytest.mark.parametrize("changes", POSSIBLE, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c in POSSIBLE])
def test_its_possible_neighbour_is_built(changes: dict[str, Any]) -> None:
    model = TransformerForCausalLM(TransformerConfig(vocab_size=5, context=4, **SMALL | changes)).eval()
    assert model(torch.tensor([[0, 1, 2, 4]])).logits.shape == (1, 4, 5)


def test_what_is_not_given_is_derived() -> None:
    layer = TransformerConfig(d_model=12, heads=3, n_layers=1).layers[0]
    assert (layer.key_heads, layer.d_qk, layer.d_v, layer.hidden) == (3, 4, 4, 48)
    gated = TransformerConfig(d_model=96, heads=3, n_layers=1, activation="swiglu", d_qk=8).layers[0]
    assert (gated.d_v, gated.hidden) == (8, 256)


def test_lists_give_each_layer_its_own_shape() -> None:
    config = TransformerConfig(
        d_model=12, n_layers=3, heads=[1, 2, 3], d_v=[5, 6, 7], query=["full", "identity", "full"]
    )
    assert [(s.heads, s.d_qk, s.d_v, s.query) for s in config.layers] == [
        (1, 12, 5, "full"),
        (2, 6, 6, "identity"),
        (3, 4, 7, "full"),
    ]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 3, 12)


def test_a_config_survives_its_own_json() -> None:
    config = TransformerConfig(**SMALL | {"d_v": [2, 3], "biases": ["down", "query"], "scale": 0.5})
    again = TransformerConfig.from_dict(config.to_dict())
    assert again.layers == config.layers and again.biases == ["query", "down"] and again.scale == 0.5


def test_a_decoder_predicts_no_masks_and_an_encoder_does_not_generate() -> None:
    with pytest.raises(ValueError, match="found causal = False; expected a decoder, or TransformerForMaskedLM"):
        TransformerForCausalLM(TransformerConfig(**SMALL, causal=False))
    with pytest.raises(ValueError, match="found causal = True; expected an encoder, or TransformerForCausalLM"):
        TransformerForMaskedLM(TransformerConfig(**SMALL))
