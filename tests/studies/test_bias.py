"""Biases: roles by name, what a norm ignores, and a gradient that is zero where the law says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

ROLES = {
    "transformer.h.0.attn.c_attn.bias": "qkv",
    "transformer.h.0.attn.c_proj.bias": "b_O",
    "transformer.h.0.mlp.c_proj.bias": "b_2",
    "transformer.h.0.ln_1.bias": "norm",
    "encoder.layer.3.attention.self.key.bias": "b_K",
    "encoder.layer.3.attention.output.dense.bias": "b_O",
    "encoder.layer.3.attention.output.LayerNorm.bias": "norm",
    "encoder.layer.3.intermediate.dense.bias": "b_1",
    "encoder.layer.3.output.dense.bias": "b_2",
    "model.layers.1.self_attn.q_proj.bias": "b_Q",
    "model.encoder.layers.1.encoder_attn.v_proj.bias": "b_V",
    "gpt_neox.layers.2.attention.query_key_value.bias": "qkv",
    "gpt_neox.layers.2.mlp.dense_h_to_4h.bias": "b_1",
    "model.norm.bias": None,
}


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_a_bias_is_known_by_its_name(study: Callable, name: str, role: str | None) -> None:
    assert study("s1_bias").role_of(name) == role


def test_norms_ignore_what_the_laws_say(study: Callable) -> None:
    for told in study("s1_bias").in_modules():
        dead = sum(dof for law, dof in told["audit"].items() if law.endswith("dead"))
        assert told["dead_by_jacobian"] == dead, told["case"]


def test_the_key_bias_has_no_gradient_unless_positions_turn_it(study: Callable) -> None:
    s1, text = study("s1_bias"), np.arange(4000, dtype=np.uint8) % 101
    train = s1.Train(steps=3, batch=2, warmup=1)
    still, turned = (s1.trained(v, 1, train, text) for v in ("all biases", "rotary, all biases"))
    assert still["key_over_query_gradient"] < 1e-4 < 1e-2 < turned["key_over_query_gradient"]


def test_a_variant_starts_where_the_model_with_all_biases_starts(study: Callable) -> None:
    s1, text = study("s1_bias"), np.arange(4000, dtype=np.uint8) % 101
    train = s1.Train(steps=2, batch=2, warmup=1)
    full, without, other = (s1.trained(v, 1, train, text) for v in ("all biases", "without b_K", "without b_V"))
    assert abs(full["valid_loss"][0] - without["valid_loss"][0]) < 1e-5 and "key" not in without["bias_norms"]
    assert full["valid_loss"][0] != other["valid_loss"][0]


def test_zeroing_the_key_bias_of_a_trained_model_changes_nothing(study: Callable) -> None:
    query, key = (study("s1_bias").zeroed_gpt2(part, 2) for part in (0, 1))
    assert key["error"] < 1e-10 and key["norm"] > 1 and query["error"] > 1e-3


@pytest.mark.parametrize("names", [(), ("query",), ("query", "key")])
def test_norms_behind_projections_are_read_from_the_graph(study: Callable, names: tuple[str, ...]) -> None:
    s1 = study("s1_bias")
    options = {f"{name}_norm": True for name in names}
    config = TransformerConfig(d_model=8, n_layers=1, heads=2, vocab_size=11, context=4, use_cache=False, **options)
    module = TransformerForCausalLM(config).eval()
    graph = canonical(trace(module, (torch.zeros(1, 4, dtype=torch.long),), {}))
    assert s1.norms_behind(graph) == sorted(f"{name[0].upper()}: rms" for name in names)


@pytest.mark.slow
def test_a_record_is_written_and_read(study: Callable, tmp_path: Path) -> None:
    s1, out = study("s1_bias"), tmp_path / "record.json"
    s1.run(out=out, steps=2, seeds=2, sentences=2, only=["GPT-2"])
    record = json.loads(out.read_text(encoding="utf-8"))
    told = record["architectures"]["GPT-2"]
    assert told["roles"]["b_K"]["dof"] == {"DW002 dead": told["roles"]["b_K"]["elements"]}
    assert told["norms_behind_projections"] == []
    page = s1.written(record)
    assert "| GPT-2 | live | dead (DW002) | folds (DW003) |" in page and "## Verdicts" in page
