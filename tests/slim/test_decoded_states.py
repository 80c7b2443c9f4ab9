"""Caches from which a model's own code reads decoded states: pickled, copied, shared by threads, compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as T
from transformers import DynamicCache, StaticCache

from deadweight.compress.locate import CachedForm
from deadweight.compress.run import compress
from deadweight.slim.cache import CURRENT
from deadweight.slim.decoded_states import arrange, arrange_back, cache_argument, double_masks

IDS = torch.randint(3, 99, (16, 32), generator=torch.Generator().manual_seed(1))
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DENSE = {"num_key_value_heads": 4, "intermediate_size": 48, "n_routed_experts": 4, "first_k_dense_replace": 2}
FAMILIES = {
    "latent": lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**SIZE, **LATENT, **DENSE)),
    "own attention": lambda: T.FalconForCausalLM(T.FalconConfig(**SIZE, num_kv_heads=2, new_decoder_architecture=True)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def small(request: Any) -> Any:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = FAMILIES[request.param]().eval()
    return compress(model, inputs={"input_ids": IDS}, keep_kv=0.4).module


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def decoded(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    cache = DynamicCache() if cache is None else cache
    return torch.cat([model(token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, 1)], 1)


@pytest.mark.usefixtures("no_gradients")
def test_a_model_and_its_cache_may_be_pickled_and_copied(small: Any) -> None:
    expected = small(IDS[:2], use_cache=False).logits
    for twin in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert torch.equal(twin(IDS[:2], use_cache=False).logits, expected)
    cache = DynamicCache()
    small(IDS[:2, :12], past_key_values=cache, use_cache=True)
    twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    expected = decoded(small, IDS[:2, 12:15], cache)
    assert all(torch.equal(decoded(small, IDS[:2, 12:15], twin), expected) for twin in twins)
    assert CURRENT.call is None


@pytest.mark.usefixtures("no_gradients")
def test_a_cache_of_another_model_is_refused(small: Any) -> None:
    cache = DynamicCache()
    copy.deepcopy(small)(IDS[:2, :8], past_key_values=cache, use_cache=True)  # a copy reads the same
    decoded(small, IDS[:2, 8:9], cache)
    other = copy.deepcopy(small)
    for part in other.modules():
        if hasattr(part, "coder"):
            part.coder.value_mean.add_(1)
    with pytest.raises(ValueError, match="codes of another model"):
        decoded(other, IDS[:2, 9:10], cache)


def test_several_threads_may_call_one_model(small: Any) -> None:
    texts = [IDS[n : n + 1 + n % 2, : 8 + n] for n in range(4)]

    def each(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return decoded(small, ids)

    expected = [each(ids) for ids in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        logits = list(pool.map(each, texts * 2))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(logits, expected * 2, strict=True))


@pytest.mark.usefixtures("no_gradients")
def test_a_step_of_decoding_compiles(small: Any) -> None:
    torch._dynamo.reset()
    step = torch.compile(small, backend="aot_eager")
    caches = [StaticCache(config=small.config, max_cache_len=12) for _ in range(2)]
    for cache in caches:
        small(IDS[:2, :6], past_key_values=cache, use_cache=True)
    eager, compiled = (decoded(model, IDS[:2, 6:9], cache) for model, cache in zip((small, step), caches, strict=True))
    assert torch.allclose(eager, compiled, atol=1e-4)


def test_gradients_pass_through_decoded_states(small: Any) -> None:
    small(IDS[:2], labels=IDS[:2], use_cache=False).loss.backward()
    graded = [p for p in small.parameters() if p.grad is not None]
    assert graded and all(bool(p.grad.isfinite().all()) for p in graded)
    small.zero_grad()


@pytest.mark.parametrize("rotated_second", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_states_come_back_as_the_model_caches_them(rotated_second: bool, copies: int) -> None:
    first, second = (torch.randn(2, 3, 5, size).repeat_interleave(copies, 1) for size in (4, 6))
    form = CachedForm(rotated_second, copies)
    states = arrange(form, first, second)
    assert [x.shape[3] for x in states] == ([6, 4] if rotated_second else [4, 6])
    assert all(x.shape[1] == 3 for x in states)
    back = arrange_back(form, *states)
    assert torch.equal(back[0], first) and torch.equal(back[1], second)


def test_doubled_masks_show_decoded_keys_of_others_and_the_exact_own_key() -> None:
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    seen[:, 0] = False  # padding
    wanted = torch.cat([seen & ~torch.eye(4).bool(), seen & torch.eye(4).bool()], 1)
    least = torch.finfo(torch.float32).min
    for mask in (seen[None, None], torch.zeros(1, 1, 4, 4).masked_fill(~seen, least)):
        doubled = double_masks({"attention_mask": mask, "alibi": torch.arange(4.0)[None, None]}, 4)
        shown = doubled["attention_mask"]
        assert torch.equal((shown if shown.dtype == torch.bool else shown == 0)[0, 0], wanted)
        assert doubled["alibi"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert int(double_masks({}, 4)["attention_mask"].sum()) == 10
    with pytest.raises(ValueError, match=r"found a mask of shape \(1, 4\)"):
        double_masks({"attention_mask": torch.ones(1, 4)}, 4)


def test_a_module_that_takes_no_cache_is_named() -> None:
    with pytest.raises(NotImplementedError, match="a cache that Linear is given in an unknown way"):
        cache_argument(torch.nn.Linear(2, 2))
