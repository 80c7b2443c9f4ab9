"""Small models of many families, with random weights that no two heads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as T

from deadweight.transformer import TransformerConfig, TransformerForCausalLM

SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
SHARED = {**SIZE, "num_key_value_heads": 2}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = {k: v for k, v in SIZE.items() if k not in ("vocab_size", "max_position_embeddings")}
OURS = {"vocab_size": 99, "context": 64, "d_model": 32, "n_layers": 2, "heads": 4, "key_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)
    ),
    "opt": lambda: T.OPTForCausalLM(T.OPTConfig(**SIZE, ffn_dim=48, word_embed_proj_dim=32)),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SIZE)),
    "roberta": lambda: T.RobertaModel(T.RobertaConfig(**SIZE), add_pooling_layer=False),
    "vit": lambda: T.ViTModel(T.ViTConfig(**IMAGE, image_size=32, patch_size=8)),
    "whisper": lambda: T.WhisperForConditionalGeneration(T.WhisperConfig(**WHISPER)),
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**SHARED)),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**SHARED)),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**SHARED)),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**SHARED, head_dim=8)),
    "gemma": lambda: T.GemmaForCausalLM(T.GemmaConfig(**SHARED, head_dim=8)),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**SHARED, head_dim=8, query_pre_attn_scalar=8)),
    "gemma3": lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**SHARED, head_dim=8, query_pre_attn_scalar=8)),
    "phi": lambda: T.PhiForCausalLM(T.PhiConfig(**SIZE)),
    "phi3": lambda: T.Phi3ForCausalLM(T.Phi3Config(**SHARED, pad_token_id=0, eos_token_id=2)),
    "gpt_neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**SIZE)),
    "ours": lambda: TransformerForCausalLM(TransformerConfig(**OURS, positions="rotary")),
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DENSE = {"n_routed_experts": 4, "first_k_dense_replace": 2}
NARROW = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {k: v for k, v in SIZE.items() if k != "intermediate_size"}
OWN_READERS: dict[str, Callable[[], Any]] = {  # families whose own code reads the states that are cached
    "deepseek_v2": lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**SIZE, **LATENT, **DENSE)),
    "deepseek_v3": lambda: T.DeepseekV3ForCausalLM(
        T.DeepseekV3Config(**SIZE, **LATENT, **EXPERTS, first_k_dense_replace=2)
    ),
    "gptj": lambda: T.GPTJForCausalLM(T.GPTJConfig(**NARROW, n_positions=64, rotary_dim=4)),
    "falcon": lambda: T.FalconForCausalLM(T.FalconConfig(**FALCON)),  # one key head
    "falcon_grouped": lambda: T.FalconForCausalLM(
        T.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True)  # caches every key head twice
    ),
    "falcon_alibi": lambda: T.FalconForCausalLM(T.FalconConfig(**FALCON, alibi=True, multi_query=False)),
    "codegen": lambda: T.CodeGenForCausalLM(T.CodeGenConfig(**NARROW, n_positions=64, rotary_dim=4)),
    "diffllama": lambda: T.DiffLlamaForCausalLM(T.DiffLlamaConfig(**SHARED)),  # reads pairs of heads of values
    "bloom": lambda: T.BloomForCausalLM(T.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)),
}
BART = {
    **{k: v for k, v in WHISPER.items() if k not in ("max_source_positions", "max_target_positions", "num_mel_bins")},
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "eos_token_id": 2}
BEHIND_ENCODERS: dict[str, Callable[[], Any]] = {
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**BART)),
    "marian": lambda: T.MarianMTModel(T.MarianConfig(**BART)),
    "t5": lambda: T.T5ForConditionalGeneration(T.T5Config(**T5, decoder_start_token_id=0)),
}


def made(name: str) -> Any:
    """A model whose biases and gains are random too: zeros would hide mistakes."""
    torch.manual_seed(0)
    model = (MODELS | OWN_READERS | BEHIND_ENCODERS)[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def divergence(model: Any, small: Any, given: dict[str, torch.Tensor]) -> float:
    """The KL divergence in nats per token, in float64: that of small models is near the noise of float32."""
    a, b = (m(**given, use_cache=False).logits.double().log_softmax(-1) for m in (model, small))
    return float((a.exp() * (a - b)).sum(-1).mean())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Callable[[str], Any]:
    return made


@pytest.fixture
def words(tmp_path: Any) -> dict[str, torch.Tensor]:
    """Calibration inputs for the small language models."""
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, 99, (24, 32), generator=generator)}
