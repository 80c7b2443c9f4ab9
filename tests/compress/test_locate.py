"""Heads are found in every family, whatever way its weights are laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deadweight.compress.locate import ForwardRecord, Seen, examples_needed, locate, match
from deadweight.errors import DeadweightError
from deadweight.source.model import open_model

from .conftest import MODELS

FUSED = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}
BEHIND_A_NORM = ("qwen3", "gemma3")
PAIRS = {"phi": 2, "gpt_neox": 1} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "ours"), 4
)


@pytest.mark.parametrize("family", MODELS)
def test_every_attention_of_a_family_is_found_with_its_weights(family: str, make: Callable[[str], Any]) -> None:
    found = locate(open_model(make(family)))
    assert len(found) == (6 if family == "whisper" else 2)
    for heads in found:
        assert heads.heads == 4 and heads.d_qk == heads.d_v == 8 and heads.keys_unclear is None
        assert len(heads.rotary_pairs) == PAIRS.get(family, 0) and len(heads.non_rotary) == 8 - 2 * len(
            heads.rotary_pairs
        )
        assert heads.value is not None and heads.output is not None
        assert (heads.query is None) == (family in BEHIND_A_NORM) == (heads.key is None)
        if family in FUSED:
            assert heads.value.module.endswith(FUSED[family])
            rows = {int(r) for side in (heads.query, heads.key, heads.value) if side for r in side.places.flatten()}
            assert len(rows) == (4 + 2 * heads.key_heads) * 8


def test_the_rows_found_make_up_what_attention_sees(make: Callable[[str], Any]) -> None:
    model = make("opt")  # its queries are scaled before they meet the keys
    heads = locate(open_model(model))[0]
    assert heads.query is not None
    assert torch.allclose(heads.query.factor, torch.full((4, 8), 8**-0.5, dtype=torch.float64), atol=1e-5)
    assert torch.equal(heads.query.places, torch.arange(32).view(4, 8))


def test_a_negated_column_is_no_match() -> None:
    rows = torch.randn(40, 6, dtype=torch.float64)
    assert match(rows[:, [2, 0]] * 3, rows, torch.float32) is not None
    twice = rows[:, [0, 1, 1]]
    copies = match(twice, twice, torch.float32)
    assert copies is not None and copies[0].tolist() == [0, 1, 2]
    assert match(-rows[:, [2, 0]], rows, torch.float32) is None
    assert match(rows[:, [2, 0]] + 0.01 * torch.randn(40, 2), rows, torch.float32) is None


def test_a_model_without_softmax_attention_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(DeadweightError, match="found a Plain; expected a model of transformers"):
        locate(open_model(Plain(), inputs=(torch.randn(2, 4),)))


def test_attention_with_sinks_is_refused_by_name() -> None:
    import transformers as T

    from .conftest import SHARED

    config = T.GptOssConfig(**SHARED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(DeadweightError, match="attention with s_aux, which compressed heads do not support"):
        locate(open_model(T.GptOssForCausalLM(config)))


@pytest.mark.parametrize(("heads", "size"), [(4, 256), (1, 128)])
def test_wide_heads_get_twice_as_many_vectors_as_they_have_dimensions(heads: int, size: int) -> None:
    """With fewer, rotary pairs are not told apart. Gemma 3 has 4 heads of 256 dimensions."""
    states = torch.zeros(1, heads, 5, size)
    run = ForwardRecord({"attention": Seen(states, states, states, states, {})})
    assert examples_needed(run) * heads >= 2 * size
