"""Models of which only a config is known, and whose Python asks for values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import deadweight
from deadweight.source import materialise
from deadweight.source.model import open_model

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 40}
XMOD = SIZES | {"max_position_embeddings": 32, "languages": ["en_XX", "de_DE"], "default_language": "en_XX"}
JETMOE = {"hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "vocab_size": 40}
JETMOE |= {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
LONGFORMER = SIZES | {"max_position_embeddings": 64, "attention_window": [4, 4]}
DBRX = {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 16, "vocab_size": 40}
DBRX |= {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}}
MODELS = {"xmod": XMOD, "jetmoe": JETMOE, "longformer": LONGFORMER, "dbrx": DBRX}


def config_file(tmp_path: Path, kind: str, sizes: dict[str, Any]) -> Path:
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


@pytest.mark.parametrize("kind", ["xmod", *(pytest.param(k, marks=pytest.mark.slow) for k in MODELS if k != "xmod")])
def test_a_config_whose_model_asks_for_values_is_traced(kind: str, tmp_path: Path) -> None:
    result = deadweight.audit(config_file(tmp_path, kind, MODELS[kind]))
    assert result.untraced is None and result.findings


def test_random_numbers_are_put_into_a_copy(tmp_path: Path) -> None:
    source = open_model(config_file(tmp_path, "xmod", XMOD))
    filled = materialise.with_values(source)
    assert filled is not None and filled.has_weights and not source.has_weights
    assert all(p.is_meta for p in source.module.parameters())
    assert all(bool(torch.isfinite(t).all()) for t in filled.module.state_dict().values())
    assert filled.module(**filled.kwargs).logits.shape[-1] == 40


def test_a_model_that_is_too_large_or_has_weights_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert materialise.with_values(open_model(torch.nn.Linear(2, 2), inputs=torch.randn(1, 2))) is None
    monkeypatch.setattr(materialise, "MOST_PARAMETERS", 1000)
    assert materialise.with_values(open_model(config_file(tmp_path, "xmod", XMOD))) is None
