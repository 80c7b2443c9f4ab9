"""Decoding on a CPU gives what the operations for every device give, in the memory of one block of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from deadweight.compress.run import compress
from deadweight.slim import cache as cache_file
from deadweight.slim import coded_attention, cpu_decode
from deadweight.slim.coder import Coder
from deadweight.slim.cpu_encode import encode_on_cpu

from ..compress.conftest import made

FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen2", "ours")  # rotary, learned positions, partly rotary, biases, our own
SHARES = {"llama": 0.4, "gpt2": 0.25, "gpt_neox": 0.4, "qwen2": 0.4, "ours": 0.3}
IDS = torch.randint(3, 99, (24, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def small(request: pytest.FixtureRequest) -> Any:
    family = request.param
    with torch.enable_grad():
        return compress(made(family), inputs={"input_ids": IDS}, keep_kv=SHARES[family]).module.double()


def decode(model: Any, ids: torch.Tensor, cache: Any, padding: int = 0) -> torch.Tensor:
    """The logits of all tokens after the tenth, decoded one by one; the first row may have padding before it."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    steps = []
    with torch.no_grad():
        for start, end in [(0, 10), *((t, t + 1) for t in range(10, ids.shape[1]))]:
            own = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            steps.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **own).logits[:, -1])
    return torch.stack(steps, 1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many attentions have been decoded by the operations for CPUs."""
    calls = [0]

    def count(*args: Any) -> torch.Tensor:
        calls[0] += 1
        return cpu_decode.decode_on_cpu(*args)

    monkeypatch.setattr(coded_attention, "decode_on_cpu", count)
    return calls


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the operations for every device."""
    monkeypatch.setattr(coded_attention, "decodes_on_cpu", lambda *_: False)
    monkeypatch.setattr(
        cache_file, "encode_on_cpu", lambda coder, key, value, at: coder.encode(key, value, torch.tensor(at)[:, None])
    )


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("block", [cpu_decode.BLOCK, 1])
def test_it_gives_what_every_device_gives(
    small: Any, padding: int, block: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same codes, and the same logits up to rounding in float64; norms of some models round to float32."""
    monkeypatch.setattr(cpu_decode, "BLOCK", block)
    monkeypatch.setattr(cpu_decode, "ROWS", 8 if block == 1 else cpu_decode.ROWS)
    caches = [DynamicCache(config=small.config) for _ in range(2)]
    own = decode(small, IDS[:3], caches[0], padding)
    assert counted[0] == 22 * sum(isinstance(m, Coder) for m in small.modules())
    elsewhere(monkeypatch)
    wanted = decode(small, IDS[:3], caches[1], padding)
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    assert float((own - wanted).abs().max()) < 1e-9 * float(wanted.abs().max())


def test_static_caches_give_the_same(small: Any) -> None:
    static = StaticCache(config=small.config, max_cache_len=40)
    own, wanted = decode(small, IDS[:2], static), decode(small, IDS[:2], DynamicCache(config=small.config))
    assert float((own - wanted).abs().max()) < 1e-9 * float(wanted.abs().max())


@pytest.mark.parametrize("change", ["key_decode", "value_mean", "key_mean"])
def test_a_map_that_changes_is_read_again(small: Any, change: str) -> None:
    """What is made once of a coder must not outlive it."""
    before = decode(small, IDS[:2], DynamicCache(config=small.config))
    coder = next(m for m in small.modules() if isinstance(m, Coder))
    buffer = getattr(coder, change)
    kept = buffer.clone()
    buffer.add_(0.5)
    after = decode(small, IDS[:2], DynamicCache(config=small.config))
    buffer.copy_(kept)
    assert not torch.allclose(before[:, 1:], after[:, 1:])
    assert torch.equal(decode(small, IDS[:2], DynamicCache(config=small.config)), before)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_what_cannot_be_coded_gets_the_largest_scale(small: Any, number: float) -> None:
    coder = next(m for m in small.modules() if isinstance(m, Coder))
    spec = coder.spec
    key, value = (torch.randn(2, spec.key_heads, 1, d, dtype=torch.float64) for d in (spec.d_qk, spec.d_v))
    key[0, 0, 0, 0] = number
    own, wanted = encode_on_cpu(coder, key, value, [3, 4])[1], coder.encode(key, value, torch.tensor([[3], [4]]))[1]
    assert torch.equal(own & 15, wanted & 15)


def test_memory_beside_the_cache_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take: Callable[..., torch.Tensor] = cpu_decode.SCRATCH.take

    def noted(name: str, shape: tuple[int, ...], *rest: Any) -> torch.Tensor:
        taken.append(shape[0] * shape[1])
        return take(name, shape, *rest)

    model: Any = compress(made("llama"), inputs={"input_ids": IDS}, keep_kv=0.4).module
    monkeypatch.setattr(cpu_decode, "BLOCK", 64)
    ids = torch.randint(3, 99, (1, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        monkeypatch.setattr(cpu_decode.SCRATCH, "take", noted)
        model(ids[:, :1], past_key_values=past, use_cache=True)
    assert taken and max(taken) == 64
