"""One product for queries, keys and values is the same function, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deadweight.train.fused_projections import with_fused_projections
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

SIZES = {"d_model": 16, "n_layers": 2, "heads": 4, "context": 8, "vocab_size": 20}


@pytest.mark.parametrize(
    "changes",
    [{}, {"biases": ["query", "value"]}, {"key_heads": 2, "d_qk": 4, "d_v": 6}, {"query": "identity"}],
    ids=["plain", "some biases", "grouped keys", "identity"],
)
def test_logits_and_gradients_stay_the_same(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = TransformerForCausalLM(TransformerConfig(**{**SIZES, **changes})).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(20, (3, 8))
    results = []
    for made in (model, with_fused_projections(model)):
        made.zero_grad()
        output = made(tokens, labels=tokens)
        output.loss.backward()
        results.append((output.logits.detach(), [p.grad.clone() for p in made.parameters() if p.grad is not None]))
    (one, gradients), (other, others) = results
    assert torch.allclose(one, other, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients, others, strict=True))
    assert ("project" in vars(model.transformer.layers[0].attention)) == ("query" not in changes)
