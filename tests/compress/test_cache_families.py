"""Caches of families that differ in what they cache: latents, copies of heads, one head, values of another size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from transformers import DynamicCache

import deadweight
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.run import compress
from deadweight.slim.cache import CURRENT
from deadweight.slim.coder import Coder

from .conftest import LATENT, NARROW, OWN_READERS, SHARED, divergence

VALUES = {"head_dim": 8, "v_head_dim": 6, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
KINDS = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]}
ONE_HEAD: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**SHARED, "num_key_value_heads": 1})),
    "gpt_bigcode": lambda: T.GPTBigCodeForCausalLM(T.GPTBigCodeConfig(**NARROW, n_positions=64)),
    "values of another size": lambda: T.MiMoV2FlashForCausalLM(
        T.MiMoV2FlashConfig(**{**SHARED, "num_key_value_heads": 1}, **VALUES, **KINDS)  # and two heads, with sinks
    ),
}


def coded(model: Any, words: Any, **options: Any) -> CacheCompression:
    result = compress(model, inputs=words, **options)
    assert isinstance(result, CacheCompression)
    return result


def shaken(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("family", ONE_HEAD)
def test_one_key_head_and_values_of_another_size_are_coded(family: str, words: Any) -> None:
    torch.manual_seed(0)
    model = shaken(ONE_HEAD[family]()).double()
    result = coded(model, words, keep_kv=0.6)
    small: Any = result.module
    ids = words["input_ids"][:2, :20]
    spec = next(iter(result.caches.values()))
    assert spec.reader == "codes" and spec.key_heads == 1 and (spec.d_v < spec.d_qk) == ("size" in family)
    with torch.no_grad():
        wanted, whole = model(ids).logits, small(ids, use_cache=False).logits
        cache = DynamicCache(config=small.config)
        steps = [small(token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, 1)]
        for coder in (part for part in small.modules() if isinstance(part, Coder)):
            coder.rounds = False
        exact = small(ids, use_cache=False).logits
    size = float(wanted.abs().max())
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-6 * size)
    assert float((wanted - exact).abs().max()) < 1e-8 * size < float((wanted - whole).abs().max())


def test_a_decoder_whose_modules_do_not_say_that_they_are_causal(words: Any) -> None:
    torch.manual_seed(0)
    sizes = {"decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "vocab_size": 99}
    config = T.BigBirdPegasusConfig(**sizes, d_model=32, max_position_embeddings=64, is_decoder=True)
    model = shaken(T.BigBirdPegasusForCausalLM(config)).double()
    ids = words["input_ids"][:2, :20]
    small: Any = coded(model, words, keep_kv=1.0).module
    for coder in (part for part in small.modules() if isinstance(part, Coder)):
        coder.rounds = False
    packed: Any = compress(model, inputs=words, keep_attention=1.0).module
    later = torch.cat([ids[:, :10], ids[:, 10:].flip(1)], 1)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        for module in (small, packed):
            found, other = (module(tokens, use_cache=False).logits for tokens in (ids, later))
            assert torch.allclose(found, wanted, atol=1e-8 * float(wanted.abs().max()))
            assert torch.equal(found[:, :10], other[:, :10]) and not torch.allclose(found[:, 10:], other[:, 10:])


@pytest.mark.parametrize("family", OWN_READERS)
def test_the_loss_is_about_the_predicted_one(family: str, make: Callable, words: Any) -> None:
    model = make(family).double()
    result = coded(model, words, keep_kv=0.5)
    loss = divergence(model, result.module, words)
    assert 0.5 * result.point.predicted < loss < 2 * result.point.predicted  # the second order alone, of few tokens


@pytest.mark.parametrize("family", OWN_READERS)
def test_a_written_folder_gives_the_same_logits(family: str, make: Callable, words: Any, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path / "in")
    result = coded(str(tmp_path / "in"), words, keep_kv=0.4)
    compress(str(tmp_path / "in"), tmp_path / "out", inputs=words, keep_kv=0.4)
    loaded: Any = deadweight.load(tmp_path / "out")
    remote = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids, small = words["input_ids"][:2, :16], result.module
    assert small is not None
    with torch.no_grad():
        expected, original = small(ids, use_cache=False).logits, model(ids).logits
        for other in (loaded, remote):
            assert torch.equal(other(ids, use_cache=False).logits, expected)
        assert not torch.allclose(expected, original, atol=1e-3)
        assert torch.allclose(type(model).from_pretrained(tmp_path / "out")(ids).logits, original, atol=1e-5)
    assert torch.equal(*(m.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0) for m in (loaded, remote)))
    assert CURRENT.call is None


def test_latents_are_stored_as_codes_and_counted_as_latents(make: Callable, words: Any) -> None:
    result = coded(make("deepseek_v3"), words, keep_kv=0.4)
    spec = next(iter(result.caches.values()))
    assert (spec.key_heads, spec.d_qk, spec.d_v) == (1, LATENT["qk_rope_head_dim"], LATENT["kv_lora_rank"])
    assert spec.reader == "states" and spec.rotated_second and spec.pairs == 2
    cached, read = 2 * (16 + 4), 2 * 4 * (8 + 4 + 6)  # numbers per token, of two layers
    share = result.point.share * cached / read
    note = f"of the {read} numbers that attention reads, which are made from them, this cache takes {share:.2%}"
    assert any(f"of the {cached} numbers per token that the model caches; {note}" in line for line in result.notes)
    cache, small = DynamicCache(), result.module
    assert small is not None
    with torch.no_grad():
        small(words["input_ids"][:1], past_key_values=cache, use_cache=True)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    first = sum(x.numel() * 2 for layer in cache.layers for x in layer.first)
    assert held + first == sum(own.bytes_at(32) for own in result.caches.values())


def test_heads_that_the_model_copies_are_stored_once(make: Callable, words: Any) -> None:
    result = coded(make("falcon_grouped"), words, keep_kv=0.4)
    spec = next(iter(result.caches.values()))
    assert (spec.key_heads, spec.copies) == (2, 2)
    assert any("every key head once; the model's own cache has up to 2 copies" in line for line in result.notes)
    assert all(own.copies == 1 for own in coded(make("falcon_alibi"), words, keep_kv=0.4).caches.values())
