"""Caches of codes are for the model that writes them, and may be copied."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import deadweight
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CURRENT
from deadweight.slim.coded_attention import coded_attention, first_rows, with_first
from deadweight.slim.coder import Coder, folds_of, masks_of, quantisers_of, turns
from deadweight.slim.format import CacheSpec, UnitRun

CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(3, 99, (24, 24), generator=torch.Generator().manual_seed(1))


def original() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**CONFIG, intermediate_size=48, vocab_size=99, max_position_embeddings=64)
    ).eval()


@pytest.fixture(scope="module")
def small() -> Any:
    return compress(original(), inputs={"input_ids": IDS}, keep_kv=0.4).module


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def after_prompt(model: Any, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = model(IDS[:2, 12:15], past_key_values=cache, use_cache=True).logits
    return logits


@pytest.mark.usefixtures("no_gradients")
def test_a_copied_cache_continues_from_the_same_state(small: Any) -> None:
    cache = DynamicCache()
    small(IDS[:2, :12], past_key_values=cache, use_cache=True)
    twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    assert twins[0].layers[0].coder is cache.layers[0].coder  # its maps are not copied
    expected = after_prompt(small, cache)
    assert all(torch.equal(after_prompt(small, twin), expected) for twin in twins)
    assert torch.equal(after_prompt(copy.deepcopy(small), twins[0]), after_prompt(small, cache))


@pytest.mark.usefixtures("no_gradients")
def test_a_model_may_be_pickled_and_copied(small: Any) -> None:
    expected = small(IDS[:2], use_cache=False).logits
    for twin in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert type(twin) is type(small)
        assert torch.equal(twin(IDS[:2], use_cache=False).logits, expected)


@pytest.mark.usefixtures("no_gradients")
def test_a_cache_of_another_model_is_refused(small: Any) -> None:
    other: Any = None
    with torch.enable_grad():
        other = compress(original(), inputs={"input_ids": IDS}, keep_kv=0.3).module
    for writer, message in ((original(), "keys of another model"), (other, "codes of another model")):
        cache = DynamicCache()
        writer(IDS[:2, :12], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match=message):
            after_prompt(small, cache)


@pytest.mark.usefixtures("no_gradients")
def test_memory_that_is_allocated_early_holds_codes(small: Any) -> None:
    early = StaticCache(config=small.config, max_cache_len=20)
    early.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    late = StaticCache(config=small.config, max_cache_len=20)
    for cache in (early, late):
        small(IDS[:2, :12], past_key_values=cache, use_cache=True)
    assert early.layers[0].keys.dtype == torch.uint8
    assert torch.equal(after_prompt(small, early), after_prompt(small, late))


@pytest.mark.usefixtures("no_gradients")
def test_a_cache_that_is_cropped_to_nothing_starts_again(small: Any) -> None:
    """Also where the new text has other padding."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    cropped, fresh = DynamicCache(), DynamicCache()
    small(IDS[:2, :12], attention_mask=mask, past_key_values=cropped, use_cache=True)
    cropped.crop(-12)
    for cache in (cropped, fresh):
        small(IDS[2:4, :12], past_key_values=cache, use_cache=True)
    assert all(torch.equal(a.start, b.start) for a, b in zip(cropped.layers, fresh.layers, strict=True))
    assert torch.equal(after_prompt(small, cropped), after_prompt(small, fresh))


@pytest.mark.usefixtures("no_gradients")
def test_nothing_of_a_call_stays_in_the_model(small: Any) -> None:
    small(IDS[:2], use_cache=False)
    small(IDS[:2], use_cache=True)
    assert CURRENT.call is None


def test_a_folder_without_transforms_is_refused(small: Any, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.coder.key_decode"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DeadweightError, match=r"has no model\.layers\.1\.self_attn\.coder\.key_decode"):
        deadweight.load(tmp_path)


HOSTILE = [
    {"first": -1}, {"first": 10**9}, {"first": "4"}, {"pairs": 5}, {"pairs": -1}, {"pairs": True}, {"key_heads": 0},
    {"key_heads": 2.0}, {"heads": 5}, {"d_qk": -8, "key_heads": -2}, {"heads": None}, {"sets": 3}, {"sets": [3]},
    {"sets": [[{"count": 8.0, "widths": [8, 8]}]]}, {"sets": [[{"count": 8, "widths": [8, "8"]}]]},
    {"sets": [[{"count": 1 << 40, "widths": [8, 8]}]]}, {"value_fields": -1}, {"key_fields": True}, {"more": 1},
    {"reader": "nobody"}, {"reader": []}, {"copies": 0}, {"copies": 1.0}, {"rotated_second": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    row = {"key_fields": 1, "value_fields": 1, "sets": [[{"count": 8, "widths": [8, 8]}]]}
    raw = {"heads": 4, "key_heads": 2, "d_qk": 8, "d_v": 8, "pairs": 4, "first": 4, **row}
    assert CacheSpec.from_json("a.b", json.loads(json.dumps(raw))).pairs == 4
    with pytest.raises(ValueError, match=r"found a cache at a\.b that does not fit"):
        CacheSpec.from_json("a.b", {**raw, **change})


def decoded(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    cache = DynamicCache() if cache is None else cache
    return torch.cat([model(token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, 1)], 1)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns so often that they meet inside one attention."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_several_threads_may_call_one_model(small: Any) -> None:
    """Each with its own cache, batch and length."""
    texts = [IDS[n : n + 1 + n % 2, : 8 + n] for n in range(4)]

    def each(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return decoded(small, ids)

    expected = [each(ids) for ids in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        logits = list(pool.map(each, texts * 4))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(logits, expected * 4, strict=True))


def test_a_model_that_ran_in_inference_mode_runs_in_every_other_mode(small: Any) -> None:
    """Tables and memory that calls share are made by whoever comes first."""
    for known in (turns, folds_of, masks_of, quantisers_of):
        known.cache_clear()
    ids = IDS[:2, :10]

    def in_a_new_thread() -> list[torch.Tensor]:
        with torch.inference_mode():
            first = decoded(small, ids).clone()
        with torch.no_grad():
            second = decoded(small, ids)
        third = decoded(small, ids)
        small(ids, labels=ids, use_cache=False).loss.backward()
        small.zero_grad()
        return [first, second, third.detach()]

    with ThreadPoolExecutor(1) as pool:
        first, *others = pool.submit(in_a_new_thread).result()
    assert all(torch.allclose(first, other, atol=1e-5) for other in others)


@pytest.mark.usefixtures("no_gradients")
def test_a_step_of_decoding_compiles_as_one_graph(small: Any) -> None:
    torch._dynamo.reset()
    step = torch.compile(small, backend="aot_eager", fullgraph=True)
    caches = [StaticCache(config=small.config, max_cache_len=12) for _ in range(2)]
    for cache in caches:
        small(IDS[:2, :6], past_key_values=cache, use_cache=True)
    eager, compiled = (decoded(model, IDS[:2, 6:9], cache) for model, cache in zip((small, step), caches, strict=True))
    assert torch.allclose(eager, compiled, atol=1e-4)


@pytest.mark.usefixtures("no_gradients")
def test_layers_without_positions_compile_from_the_first_token_on() -> None:
    """Their keys are views of what the map gives, which a compiler does not let us change in place."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 8, "intermediate_size": 48, "intermediate_size_mlp": 48, "vocab_size": 99}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Llama4TextConfig(**sizes, **more, **experts, **ends, max_position_embeddings=128)
    ids = torch.randint(3, 99, (24, 40), generator=torch.Generator().manual_seed(1))
    model: Any = compress(Llama4ForCausalLM(config).eval(), inputs={"input_ids": ids}, keep_kv=0.4).module
    torch._dynamo.reset()
    step = torch.compile(model, backend="aot_eager")
    caches = [StaticCache(config=config, max_cache_len=12) for _ in range(2)]
    eager, compiled = (decoded(m, ids[:2, :6], cache) for m, cache in zip((model, step), caches, strict=True))
    assert torch.allclose(eager, compiled, atol=1e-4)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("first", [0, 1, 8])
def test_a_cache_may_have_another_number_of_uncoded_tokens(small: Any, first: int) -> None:
    model = copy.deepcopy(small)
    for layer in model.model.layers:
        layer.self_attn.coder.spec = replace(layer.self_attn.coder.spec, first=first)
    whole = model(IDS[:2, :12], use_cache=False).logits
    assert torch.allclose(decoded(model, IDS[:2, :12]), whole, atol=1e-4)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(("away", "rows"), [(0, 2), (0, 12), (2, 10), (3, 9), (8, 4)])
def test_what_is_written_to_a_row_does_not_depend_on_the_order(small: Any, away: int, rows: int) -> None:
    """Some first tokens have left a window or have not come yet; a device writes in any order."""
    cache = DynamicCache()
    small(IDS[:2, :12], past_key_values=cache, use_cache=True)
    layer: Any = cache.layers[0]
    places = first_rows(layer, torch.tensor(away), rows)
    for at, token, there in zip(places.at, places.token, places.lies_there, strict=True):
        written = {
            (row, t if is_there else None) for row, t, is_there in zip(*map(listed, (at, token, there)), strict=True)
        }
        assert len(written) == len({row for row, _ in written})
    states = torch.zeros(2, 2, rows, 8)
    exact = with_first(states, layer, layer.first[0], torch.tensor(away))
    for token in range(4):
        if 0 <= token - away < rows:
            assert torch.equal(exact[:, :, token - away], layer.first[0][:, :, token])
    assert not exact[:, :, max(0, 4 - away) :].any()


def listed(numbers: torch.Tensor) -> list[int]:
    values: list[int] = numbers.tolist()
    return values


@pytest.mark.parametrize("prompt", [6, 11])
def test_gradients_pass_through_tokens_that_follow_a_cache(small: Any, prompt: int) -> None:
    cache = DynamicCache()
    small(IDS[:2, :prompt], past_key_values=cache, use_cache=True)
    small(IDS[:2, prompt:12], past_key_values=cache, use_cache=True).logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in small.parameters())
    small.zero_grad()


def test_a_cache_of_another_model_says_what_it_expects() -> None:
    """The numbers of a config may be anything; a GPU kernel must not read beside the queries for it."""
    run = (UnitRun(8, (4, 4, 4, 4)),)
    coder = Coder(CacheSpec(4, 2, 8, 8, 0, 4, 2, 2, (run, run)))
    with pytest.raises(ValueError, match=r"found key heads and dimensions of keys and values \(1, 8, 1, 8\)"):
        coder.expect_states(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8))
    module = torch.nn.Module()
    module.coder = coder
    with pytest.raises(ValueError, match="found 3 query heads of 8 dimensions; expected 4 of 8"):
        coded_attention(module, torch.zeros(1, 3, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), None)
