"""A coded cache gives the logits that were judged: exact up to its rounding, the same with a cache and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import deadweight
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.run import compress
from deadweight.compress.settings import STRUCTURES
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CodedLayer
from deadweight.slim.coder import Coder

from .conftest import MODELS, OWN_READERS, SHARED

CAUSAL = [*(name for name in MODELS if name not in ("bert", "roberta", "vit", "whisper")), *OWN_READERS]

SINGLE = ("gemma2", "gptj", "codegen", "bloom")  # transformers takes their softmax in float32
STATIC = [name for name in OWN_READERS if name != "falcon_alibi"]  # whose original does not run with a static cache


def coders(model: Any) -> list[Coder]:
    return [part for part in model.modules() if isinstance(part, Coder)]


def coded(model: Any, words: Any, **options: Any) -> CacheCompression:
    result = compress(model, inputs=words, **options)
    assert isinstance(result, CacheCompression)
    return result


@pytest.mark.parametrize("family", CAUSAL)
def test_without_rounding_nothing_changes(family: str, make: Callable, words: Any) -> None:
    """Bases, rotary positions and attention are exact, in float64; only rounding is not."""
    model = make(family).double()
    small: Any = coded(model, words, keep_kv=1.0).module
    ids = words["input_ids"][:3]
    with torch.no_grad():
        a, rounded = model(ids).logits, small(ids, use_cache=False).logits
        for coder in coders(small):
            coder.rounds = False
        b = small(ids, use_cache=False).logits
    exact = 1e-6 if family in SINGLE else 1e-8
    size = float(a.abs().max())
    assert float((a - b).abs().max()) < exact * size
    assert exact * size < float((a - rounded).abs().max()) < 0.1 * size  # and rounding is what is tested


@pytest.mark.parametrize("family", CAUSAL)
def test_decoding_token_by_token_is_what_was_judged(family: str, make: Callable, words: Any) -> None:
    small: Any = coded(make(family), words, keep_kv=0.3).module
    ids = words["input_ids"][:2, :14]
    with torch.no_grad():
        whole = small(ids, use_cache=False).logits
        cache = DynamicCache(config=small.config)
        steps = [small(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(14)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4 * float(whole.abs().max()))
    stored = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert all(t.dtype == torch.uint8 for t in stored) and all(isinstance(layer, CodedLayer) for layer in cache.layers)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma2", *STATIC])
def test_a_static_cache_gives_what_a_dynamic_one_gives(family: str, make: Callable, words: Any) -> None:
    small: Any = coded(make(family), words, keep_kv=0.3).module
    ids = words["input_ids"][:2, :12]
    logits = []
    with torch.no_grad():
        for cache in (DynamicCache(config=small.config), StaticCache(config=small.config, max_cache_len=20)):
            start = small(ids[:, :6], past_key_values=cache, use_cache=True).logits
            steps = [small(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(6, 12)]
            logits.append(torch.cat([start, *steps], 1))
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].abs().max()))


@pytest.mark.parametrize("family", ["llama", *OWN_READERS])
def test_a_prompt_is_read_exactly_and_its_codes_are_read_later(family: str, make: Callable, words: Any) -> None:
    model = make(family)
    small: Any = coded(model, words, keep_kv=0.25).module
    ids = words["input_ids"][:2, :16]
    with torch.no_grad():
        prompt = small(ids, use_cache=True).logits
        assert torch.allclose(prompt, model(ids).logits, atol=1e-4)
        assert not torch.allclose(small(ids, use_cache=False).logits, prompt, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", *OWN_READERS])
def test_chunks_of_a_prompt_see_codes_of_the_chunks_before(family: str, make: Callable, words: Any) -> None:
    """In float64, with rounding off, they see what the whole prompt would."""
    small: Any = coded(make(family).double(), words, keep_kv=1.0).module
    ids = words["input_ids"][:2, :18]
    with torch.no_grad():
        whole = small(ids, use_cache=True).logits
        cache = DynamicCache()
        chunks = [small(ids[:, a : a + 6], past_key_values=cache, use_cache=True).logits for a in (0, 6, 12)]
    exact = 1e-6 if family in SINGLE else 1e-10
    assert torch.allclose(chunks[0], whole[:, :6], atol=exact)  # nothing is read from the cache yet
    error = (torch.cat(chunks, 1) - whole).abs().max()
    assert 1e-10 < float(error) < 0.05 * float(whole.abs().max())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", *OWN_READERS])
def test_left_padding_changes_nothing(family: str, make: Callable, words: Any) -> None:
    small: Any = coded(make(family), words, keep_kv=0.25).module
    ids = words["input_ids"][:1, :10]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = small.generate(ids, attention_mask=torch.ones_like(ids), **options)
    beside = small.generate(
        torch.cat([padded, words["input_ids"][1:2, :15]]),
        attention_mask=torch.cat([mask, torch.ones(1, 15).long()]),
        **options,
    )
    assert torch.equal(alone[0, 10:], beside[0, 15:])


@pytest.mark.parametrize(
    ("family", "given"),
    [
        (family, given)
        for family in ("llama", "qwen2", "gpt_neox", "ours", "deepseek_v2", "deepseek_v3", "gptj", "falcon")
        for given in (True, False)
    ],
)
def test_padded_forward_passes_lose_what_unpadded_ones_do(family: str, given: bool, make: Callable, words: Any) -> None:
    """Positions count from the first token, or from the padding if nothing says otherwise; keys are turned so too."""
    model = make(family)
    small: Any = coded(model, words, keep_kv=0.25).module
    ids = words["input_ids"][:4, :20]
    padded = torch.cat([torch.zeros(4, 12, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(4, 12, dtype=torch.long), torch.ones_like(ids)], 1)
    more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if given else {}
    with torch.no_grad():
        apart = (small(ids, use_cache=False).logits - model(ids).logits).norm()
        wanted = model(padded, attention_mask=mask, **more).logits[:, 12:]
        once = small(padded, attention_mask=mask, use_cache=False, **more).logits[:, 12:]
        cache, steps = DynamicCache(config=small.config), []
        for start, end in [(0, 13), *((t, t + 1) for t in range(13, 32))]:  # the padding with the first token
            own = {name: x[:, start:end] for name, x in more.items()} | {"attention_mask": mask[:, :end]}
            steps.append(small(padded[:, start:end], past_key_values=cache, use_cache=True, **own).logits[:, -1])
    assert float((once - wanted).norm()) < 1.5 * float(apart)
    assert torch.allclose(torch.stack(steps, 1), once, atol=1e-4 * float(once.abs().max()))


@pytest.mark.parametrize("family", ["llama", *OWN_READERS])
def test_beams_crops_and_resets_are_followed(family: str, make: Callable, words: Any) -> None:
    small: Any = coded(make(family), words, keep_kv=0.25).module
    ids = words["input_ids"][:3, :9]
    tokens = small.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert tokens.shape == (3, 15)
    cache, more = DynamicCache(), words["input_ids"][3:6, :3]
    with torch.no_grad():
        small(ids, past_key_values=cache, use_cache=True)
        small(more, past_key_values=cache, use_cache=True)
        cache.crop(-3)
        after = small(more, past_key_values=cache, use_cache=True).logits
        fresh = DynamicCache()
        small(ids, past_key_values=fresh, use_cache=True)
        assert torch.equal(after, small(more, past_key_values=fresh, use_cache=True).logits)
        order = torch.tensor([2, 0, 0])
        fresh.reorder_cache(order)
        reordered = small(more[order], past_key_values=fresh, use_cache=True).logits
        again = DynamicCache()
        small(ids[order], past_key_values=again, use_cache=True)
        small(more[order], past_key_values=again, use_cache=True)
        assert torch.allclose(reordered, small(more[order], past_key_values=again, use_cache=True).logits, atol=1e-5)
        cache.reset()
        small(ids[:1], past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 9


def test_a_sliding_window_reads_the_codes_that_are_left(words: Any) -> None:
    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=99, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    small: Any = coded(model, words, keep_kv=0.3).module
    ids = words["input_ids"][:2, :20]
    with torch.no_grad():
        whole = small(ids, use_cache=False).logits
        cache = DynamicCache(config=config)
        steps = [small(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(20)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4 * float(whole.abs().max()))
    assert cache.layers[0].keys.shape[2] == 7


@pytest.mark.parametrize("static", [False, True])
def test_padding_may_be_longer_than_a_sliding_window(static: bool, words: Any) -> None:
    """A sequence starts in a chunk before which the whole window is padding."""
    config = transformers.MistralConfig(**SHARED, sliding_window=6)
    torch.manual_seed(0)
    small: Any = coded(transformers.MistralForCausalLM(config).eval(), words, keep_kv=0.3).module
    ids = words["input_ids"][:1, :12]
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids], 1)
    mask = (torch.arange(21) >= 9).long()[None]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache: Any = StaticCache(config=config, max_cache_len=24) if static else DynamicCache(config=config)
    alone, chunks, expected = DynamicCache(config=config), [], []
    with torch.no_grad():
        for a, b in ((0, 4), (4, 8), (8, 13), (13, 14), (14, 18), (18, 21)):
            given = {"attention_mask": mask[:, :b], "position_ids": places[:, a:b]}
            chunks.append(small(padded[:, a:b], **given, past_key_values=cache, use_cache=True).logits)
        for a, b in ((0, 4), (4, 5), (5, 9), (9, 12)):
            expected.append(small(ids[:, a:b], past_key_values=alone, use_cache=True).logits)
    assert all(listed == [9] for listed in (layer.start.tolist() for layer in cache.layers))
    assert torch.allclose(torch.cat(chunks, 1)[:, 9:], torch.cat(expected, 1), atol=1e-5)


def test_the_bytes_in_memory_are_those_that_were_promised(make: Callable, words: Any) -> None:
    result = coded(make("llama"), words, keep_kv=0.4)
    small: Any = result.module
    cache = DynamicCache()
    with torch.no_grad():
        small(words["input_ids"][:1], past_key_values=cache, use_cache=True)
    tokens = words["input_ids"].shape[1]
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    first = sum(x.numel() * 2 for layer in cache.layers for x in layer.first)  # counted in 16 bits, as the whole is
    assert held + first == sum(spec.bytes_at(tokens) for spec in result.caches.values())
    assert (held + first) / sum(spec.bytes_before(tokens) for spec in result.caches.values()) == result.point.share
    assert result.point.share <= 0.4


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_of_the_key_transform_is_exact_without_rounding(
    structure: str, make: Callable, words: Any
) -> None:
    model = make("llama").double()
    small: Any = coded(model, words, keep_kv=1.0, keys=structure).module
    for coder in coders(small):
        coder.rounds = False
    ids = words["input_ids"][:2]
    with torch.no_grad():
        assert torch.allclose(small(ids, use_cache=False).logits, model(ids).logits, atol=1e-8)


def test_more_bytes_cost_less_and_a_large_mean_of_keys_costs_nothing(make: Callable, words: Any) -> None:
    model = make("qwen2")
    errors = [
        coded(model, words, keep_kv=s).point.judgements["held-back calibration text"].error for s in (0.2, 0.3, 0.5)
    ]
    assert errors[0] > errors[1] > errors[2]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias += 100.0 * torch.sign(layer.self_attn.k_proj.bias)
    huge = coded(model, words, keep_kv=0.5).point.judgements["held-back calibration text"].error
    assert huge < 10 * errors[2]


def test_a_written_folder_is_the_model_that_was_judged(tmp_path: Path) -> None:
    deadweight.compress("demo", tmp_path / "out", bits=4, windows=8, length=64)
    result: Any = deadweight.compress("demo", bits=4, windows=8, length=64)
    ids = torch.arange(60, 100)[None]
    loaded: Any = deadweight.load(tmp_path / "out")
    remote = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = result.module(ids, use_cache=False).logits
        for model in (loaded, remote):
            assert torch.equal(model(ids, use_cache=False).logits, expected)
        original: Any = deadweight.load("demo")
        assert torch.equal(plain(ids).logits, original(ids).logits)  # the weights are the original's
    again = loaded.save_pretrained(tmp_path / "again")
    assert again is None
    with torch.no_grad():
        assert torch.equal(deadweight.load(tmp_path / "again")(ids, use_cache=False).logits, expected)


def test_the_smallest_cache_within_a_loss_is_found(tmp_path: Path) -> None:
    tight, loose = (compress("demo", max_loss=limit, windows=40, length=64) for limit in (0.01, 0.6))
    assert isinstance(tight, CacheCompression) and isinstance(loose, CacheCompression)
    assert loose.point.share < tight.point.share
    assert all(j.increase <= 0.01 for j in tight.point.judgements.values())


def test_a_curve_has_many_sizes_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another kind of text, of which nothing was calibrated on. " * 40)
    result = compress("demo", curve=True, windows=8, length=64, judge_text=str(tmp_path / "other.txt"))
    assert isinstance(result, CacheCompression) and len(result.points) >= 8 and result.module is None
    shares = [point.share for point in result.points]
    assert shares == sorted(shares) and all(len(point.judgements) == 2 for point in result.points)


def test_sizes_that_leave_nothing_for_codes_are_not_tried() -> None:
    """One key head of short texts: first tokens and scales take more of two stages than of one."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHARED, "num_key_value_heads": 1})).eval()
    words = {"input_ids": torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(1))}
    result = coded(model, words, curve=True)
    assert len(result.points) >= 3 and all(point.share > 0.19 for point in result.points)
    assert coded(model, words, max_loss=5.0).point.share == result.points[0].share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_kv": 0.01}, "the first 4 of a sequence, which are not coded"),
        ({"keep_kv": 1.5}, "expected a share above 0 and at most 1"),
        ({"bits": 0}, "expected bits per number"),
        ({"bits": 4, "keep_kv": 0.2}, "found several budgets"),
        ({"keep_kv": 0.25, "keys": "plane"}, "found keys='plane'"),
        ({"keep_kv": 0.25, "length": 4}, "found calibration windows of 4 tokens"),
        ({"keep_kv": 0.25, "shrink": 3}, "found an option that compress does not have"),
        ({"keep_kv": 0.25, "judge_text": "nowhere.txt"}, "does not exist"),
    ],
)
def test_bad_requests_are_refused_in_words(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match=message):
        compress("demo", tmp_path / "out", **{"windows": 4, "length": 64, **options})
    assert not (tmp_path / "out").exists()


def test_a_model_whose_cache_cannot_be_coded_is_refused(make: Callable, words: Any) -> None:
    with pytest.raises(DeadweightError, match="has no key-value cache"):
        compress(make("bert"), inputs=words, keep_kv=0.25)
    with pytest.raises(DeadweightError, match="a decoder behind an encoder that does not read tokens"):
        compress(make("whisper"), inputs=words, keep_kv=0.25)
    model = make("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(DeadweightError, match="not finite"):
        compress(model, inputs=words, keep_kv=0.25)


def test_large_means_of_keys_are_not_rounded_with_the_model(make: Callable, words: Any, tmp_path: Path) -> None:
    """Rounding to bfloat16 would move all coded keys by up to 0.2, and those that are read uncoded by nothing."""
    model = make("qwen2").to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.fill_(100.0)
    compress(model, tmp_path / "out", inputs=words, keep_kv=0.5)
    small = deadweight.load(tmp_path / "out", dtype=torch.bfloat16)
    for coder in coders(small):
        assert (coder.key_mean - 100).abs().max() < 20
        assert not torch.equal(coder.key_mean, coder.key_mean.bfloat16().float())
        assert coder.key_decode.dtype == torch.bfloat16


def test_healing_lowers_the_error_with_codes_in_the_loop() -> None:
    result = compress("demo", bits=1.5, text="embedded", windows=64, length=64, heal=100, heal_rate=1e-4)
    assert isinstance(result, CacheCompression) and result.before_healing is not None
    name = "held-back calibration text"
    # 0.21 becomes 0.15 nats per token, whatever the order of sums
    assert result.point.judgements[name].error < 0.9 * result.before_healing.judgements[name].error
    assert result.healed == 100


def test_a_loss_that_no_size_keeps_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deadweight.compress.code_cache.worst_rise", lambda point: 1.0)
    with pytest.raises(DeadweightError, match=r"a cache of 8 bits costs 1\.0000 nats per token"):
        compress("demo", tmp_path / "out", max_loss=0.01, windows=4, length=64)
    assert not (tmp_path / "out").exists()
