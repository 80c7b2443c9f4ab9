"""Exact changes of the weights keep the function, and reach what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deadweight.train.gauge import UPKEEPS, balance, remove_dead_directions
from deadweight.transformer import TransformerConfig, TransformerForCausalLM
from deadweight.transformer.shape import BIASES

SIZES = {"d_model": 16, "n_layers": 2, "heads": 2, "context": 8, "vocab_size": 20}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all biases": {"biases": [b for b in BIASES if b not in ("gate", "readout")]},
    "rotary": {"positions": "rotary"},
    "identity queries": {"query": "identity"},
    "grouped keys": {"key_heads": 1, "d_qk": 8},
    "gated, root mean square": {"activation": "swiglu", "norm": "rms"},
    "post-norm": {"norm_place": "post"},
    "key norm": {"key_norm": True},
}


def model_of(**changes: Any) -> TransformerForCausalLM:
    torch.manual_seed(0)
    model = TransformerForCausalLM(TransformerConfig(**{**SIZES, **changes})).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.3)
    return model


@pytest.mark.parametrize("upkeep", UPKEEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_function_stays_the_same(shape: str, upkeep: str) -> None:
    model, tokens = model_of(**SHAPES[shape]), torch.randint(20, (3, 8))
    before = model(tokens).logits
    UPKEEPS[upkeep](model)
    error = (model(tokens).logits - before).abs().max() / before.abs().max()
    assert float(error.detach()) < 1e-8  # float64, behind roots of Gram matrices


def test_queries_and_keys_and_values_and_output_end_with_equal_gram_matrices() -> None:
    model = model_of()
    balance(model)
    for layer in model.transformer.layers:
        a = layer.attention
        for one, other in ((a.query.weight, a.key.weight), (a.value.weight, a.output.weight.mT)):
            rows, second = (w.unflatten(0, (2, 8)) for w in (one, other))
            assert torch.allclose(rows @ rows.mT, second @ second.mT, rtol=1e-6, atol=1e-8)


def test_balance_leaves_alone_what_it_may_not_change() -> None:
    model = model_of(positions="rotary")
    before = model.transformer.layers[0].attention.query.weight.clone()
    balance(model)
    assert torch.equal(model.transformer.layers[0].attention.query.weight, before)


def test_dead_directions_are_zero_afterwards() -> None:
    model = model_of()
    remove_dead_directions(model)
    layer = model.transformer.layers[0]
    assert float(layer.attention.output.weight.mean(0).abs().max()) < 1e-12
    assert float(model.transformer.places.weight.mean(1).abs().max()) < 1e-12
    unseen = 1 / layer.mlp_norm.weight
    assert float((layer.mlp.up.weight @ unseen).abs().max()) < 1e-10
