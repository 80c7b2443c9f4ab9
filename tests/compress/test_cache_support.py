"""Models whose cache is not what their attention reads are refused; decoding with codes gives the judged logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as T

from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.cache_support import expect_same_decoded
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CodedLayer

from .conftest import EXPERTS, LATENT, SHARED, SIZE

PER_LAYER = {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}
STATES = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "keys that layers share": (
        lambda: T.Gemma3nForCausalLM(
            T.Gemma3nTextConfig(
                **{**SHARED, "num_hidden_layers": 4},
                **PER_LAYER,
                head_dim=8,
                altup_num_inputs=2,
                laurel_rank=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                activation_sparsity_pattern=[0.0] * 4,
            )
        ),
        "reads the keys of model.layers.0.self_attn",
    ),
    "latent attention that chooses keys by another cache": (
        lambda: T.DeepseekV32ForCausalLM(T.DeepseekV32Config(**SIZE, **LATENT, **EXPERTS, **INDEXER)),
        "attention with indices, which compressed heads do not support",
    ),
    "states beside keys": (
        lambda: T.FalconH1ForCausalLM(T.FalconH1Config(**SHARED, **STATES, head_dim=8)),
        "expected one plain layer for each, written once: a cache of another kind cannot be coded",
    ),
    "a mask made of values": (lambda: T.DogeForCausalLM(T.DogeConfig(**SHARED)), "cannot be coded"),
    "own attention with a mask of what is hidden": (
        lambda: T.MptForCausalLM(T.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=64)),
        "other logits than it was judged by",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_cache_of_another_kind_is_refused_and_nothing_is_written(kind: str, words: Any, tmp_path: Path) -> None:
    build, message = REFUSED[kind]
    torch.manual_seed(0)
    with pytest.raises(DeadweightError, match=message):
        compress(build().eval(), tmp_path / "out", inputs=words, keep_kv=0.4)
    assert not list(tmp_path.iterdir())


def test_a_coder_that_does_not_read_what_it_wrote_is_refused(
    make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = compress(make("llama"), inputs=words, keep_kv=0.4)
    assert isinstance(result, CacheCompression)
    small: Any = result.module
    expect_same_decoded(small, small, words, "a model")
    encode = CodedLayer.encode
    monkeypatch.setattr(CodedLayer, "encode", lambda self, key, value, past: encode(self, key, value, past + 3))
    with pytest.raises(DeadweightError, match="other logits than it was judged by"):
        expect_same_decoded(make("llama"), small, words, "a model")


def test_a_model_whose_original_decodes_to_other_logits_is_not_refused() -> None:
    """Already its original decodes to other logits: that is not the fault of codes."""

    class Drifting(torch.nn.Module):
        def forward(self, input_ids: Any, use_cache: bool, past_key_values: Any = None) -> Any:
            shift = 1.0 if use_cache else 0.0
            return SimpleNamespace(logits=torch.ones(1, input_ids.shape[1], 3) + shift, past_key_values=None)

    expect_same_decoded(Drifting(), Drifting(), {"input_ids": torch.ones(1, 8, dtype=torch.long)}, "a model")


def test_gradients_may_be_switched_off_by_the_caller(make: Callable, words: Any) -> None:
    expected = compress(make("gpt2"), inputs=words, keep_kv=0.4)
    with torch.no_grad():
        off = compress(make("gpt2"), inputs=words, keep_kv=0.4)
    with torch.inference_mode():
        inference = compress(make("gpt2"), inputs=words, keep_kv=0.4)
    for result in (off, inference):
        assert isinstance(result, CacheCompression) and isinstance(expected, CacheCompression)
        assert result.caches == expected.caches and result.point == expected.point


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge_text": "a.txt", "keep_attention": 0.5}, "found --judge-text"),
        ({"bits": 4, "layout": "stock"}, "found --bits"),
        ({"bits": 4, "method": "layer"}, "found --method, an option for smaller heads"),
        ({"curve": True, "step": 2}, "found --step, an option for smaller heads"),
        ({"method": "uniform"}, "found --method, an option for smaller heads"),
        ({"keep_kv": 0.4, "text": "a.txt", "judge_text": "a.txt"}, "both as training and as judge text"),
        (
            {"keep_kv": 0.4, "heal": 3, "heal_text": "a.txt", "judge_text": "a.txt"},
            "both as training and as judge text",
        ),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeadweightError, match=message):
        compress("demo", **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.full((8, 32), 99)}, "found input_ids from 99 to 99; expected tokens from 0 to 98"),
        ({"input_ids": torch.full((8, 32), -1)}, "found input_ids from -1 to -1"),
        ({"input_ids": torch.rand(8, 32)}, "expected whole numbers"),
        ({"input_ids": torch.zeros(8, dtype=torch.long)}, r"of shape \(8,\)"),
        ({"input_ids": torch.zeros(8, 200, dtype=torch.long)}, "found windows of 200 tokens"),
        ({"attention_mask": torch.ones(8, 31, dtype=torch.long)}, r"attention_mask of shape \(8, 31\)"),
        ({"what": torch.ones(8, 3)}, "found calibration inputs what"),
        ({"labels": torch.zeros(8, 32, dtype=torch.long)}, "found calibration inputs labels"),
        ({"position_ids": torch.arange(5, 37).expand(8, -1)}, "found position_ids other than 0, 1, …"),
    ],
)
def test_calibration_inputs_that_cannot_be_measured_are_refused(change: Any, message: str, make: Callable) -> None:
    model, ids = make("llama"), torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(DeadweightError, match=message):
        compress(model, inputs={"input_ids": ids, **change}, keep_kv=0.4)


def test_positions_from_0_on_are_measured(make: Callable) -> None:
    ids = torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(0))
    more = {"position_ids": torch.arange(32).expand(8, -1)}
    assert compress(make("llama"), inputs={"input_ids": ids, **more}, keep_kv=0.4).module is not None
    assert compress(make("llama"), inputs={"input_ids": ids.int()}, keep_kv=0.4).module is not None


@pytest.mark.parametrize(
    ("share", "keys", "is_noted"), [(0.25, "half", False), (0.8, "half", True), (0.8, "head", False)]
)
def test_half_heads_that_decode_no_faster_are_noted(
    share: float, keys: str, is_noted: bool, make: Callable, words: Any
) -> None:
    result = compress(make("llama"), inputs=words, keep_kv=share, keys=keys)
    assert isinstance(result, CacheCompression)
    assert {spec.key_fields for spec in result.caches.values()} == {4 if share == 0.25 else 1}
    assert any("--keys half decodes no faster" in note for note in result.notes) == is_noted


def test_a_model_without_variance_or_gradient_in_a_layer_is_coded(make: Callable, words: Any) -> None:
    model = make("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.zero_()  # values are a constant
        model.model.layers[1].self_attn.o_proj.weight.zero_()  # nothing that is cached matters
    for keep in (0.4, 1.0):
        result = compress(model, inputs=words, keep_kv=keep)
        assert isinstance(result, CacheCompression) and result.module is not None
        assert all(bool(b.isfinite().all()) for b in result.module.buffers() if b.is_floating_point())
        judgement = result.point.judgements["held-back calibration text"]
        assert 0 <= judgement.error < 0.05
