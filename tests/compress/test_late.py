"""Keys that are cached before rotary positions: the same function when whole, with its cache and without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import StaticCache

from deadweight.compress.late import rates_of, wrapped
from deadweight.compress.run import compress as compress_any
from deadweight.errors import DeadweightError
from deadweight.slim.attention import Packing

compress = partial(compress_any, cache="low-rank")

FAMILIES = ["llama", "qwen2", "gpt_neox", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_keys_turned_late_change_nothing(family: str, make: Callable, words: Any) -> None:
    """Up to the angles, which transformers takes in float32 too."""
    model = make(family).double()
    found = compress(model, keep_kv=1.0, inputs=words, late=True)
    ids = words["input_ids"][:2]
    with torch.no_grad():
        a, b = model(ids).logits, found.module(ids).logits  # type: ignore[misc]
        assert float((a - b).abs().max()) < 1e-5 * float(a.abs().max())
        for part in found.module.modules():  # type: ignore[union-attr]
            if isinstance(part, Packing):  # the neighbour: turned at other rates than the queries
                part.rates.copy_((part.rates.view(torch.float32) * 0.5).view(torch.int32))
        wrong = found.module(ids).logits  # type: ignore[misc]
        assert float((a - wrong).abs().max()) > 1e-3 * float(a.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_late_cache_is_as_small_as_said_and_gives_what_no_cache_gives(
    family: str, make: Callable, words: Any
) -> None:
    found = compress(make(family), keep_kv=0.5, inputs=words, late=True, step=1)
    small: Any = found.module
    ids = words["input_ids"][:2, :12]
    with torch.no_grad():
        whole = small(ids, use_cache=False).logits
        start = small(ids[:, :5], use_cache=True)
        steps = [start.logits]
        for t in range(5, 12):
            steps.append(small(ids[:, t : t + 1], past_key_values=start.past_key_values, use_cache=True).logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=2e-4 * float(whole.abs().max()))
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in start.past_key_values.layers)
    assert stored == 2 * 12 * found.kv_after and found.kv_after <= 0.5 * found.kv_before
    assert not found.left_alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_and_positions_that_do_not_count_give_what_the_original_gives(
    family: str, make: Callable, words: Any
) -> None:
    model = make(family).double()
    small: Any = compress(model, keep_kv=1.0, inputs=words, late=True).module
    ids = words["input_ids"][:2, :12]
    near = 1e-5 * float(model(ids).logits.abs().max())
    with torch.no_grad():
        cache = StaticCache(config=small.config, max_cache_len=20)
        small(ids[:, :5], past_key_values=cache)
        for t in range(5, 12):
            found = small(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
            assert torch.allclose(found, model(ids[:, : t + 1]).logits[:, -1], atol=near)
        left, right = torch.ones(2, 2, 12, dtype=torch.long).unbind()
        left[1, :4], right[1, 8:] = 0, 0
        for mask in (right,) if family == "gemma2" else (left, right):  # in float64 it makes NaN of padding on the left
            places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            how = {"attention_mask": mask, "position_ids": places, "use_cache": True}
            wanted, found = model(ids, **how).logits, small(ids, **how)
            assert torch.allclose(found.logits[mask.bool()], wanted[mask.bool()], atol=near)
            more = {"past_key_values": found.past_key_values, "attention_mask": torch.cat([mask, mask[:, :1] | 1], 1)}
            more |= {"position_ids": mask.sum(-1, keepdim=True), "input_ids": ids[:, :1]}
            if mask is left:
                before = model(ids, **how).past_key_values
                wanted = model(**more | {"past_key_values": before}).logits
                assert torch.allclose(small(**more).logits, wanted, atol=near)
            else:  # where its keys are the cache does not say
                with pytest.raises(NotImplementedError, match="padding on the left"):
                    small(**more)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4},
    ],
)
def test_rates_that_change_with_the_length_are_refused(rope: dict[str, Any], make: Callable, words: Any) -> None:
    model = make("llama")
    model.config.rope_parameters = rope
    with pytest.raises(DeadweightError, match="rates change with the length"):
        compress(model, keep_kv=0.5, inputs=words, late=True)


def test_rates_are_found_beyond_whole_turns_and_other_turns_are_refused() -> None:
    rates = torch.tensor([1.0, 0.3, 1e-5], dtype=torch.float64)
    angle = torch.arange(200, dtype=torch.float64)[:, None] * rates
    found, scale = rates_of(torch.polar(torch.full_like(angle, 3.0), angle), torch.full_like(angle, 2.0), "x")
    assert torch.allclose(found, rates, atol=1e-12) and scale == pytest.approx(1.5)
    assert float(wrapped(torch.tensor(7.0))) == pytest.approx(7.0 - 2 * torch.pi)
    with pytest.raises(DeadweightError, match="x has positions that do not turn its keys at a constant rate"):
        rates_of(torch.polar(torch.ones_like(angle), angle**2), torch.ones_like(angle), "x")


@pytest.mark.parametrize("family", ["gpt2", "ours"])
def test_without_rotary_positions_or_a_word_about_them_keys_are_joined_as_ever(
    family: str, make: Callable, words: Any
) -> None:
    late, plain = (compress(make(family), keep_kv=0.5, inputs=words, step=1, late=late) for late in (True, False))
    assert late.judgement.error == pytest.approx(plain.judgement.error, rel=1e-6)
    packings = [m for m in late.module.modules() if isinstance(m, Packing)]  # type: ignore[union-attr]
    assert packings and not any(p.late for p in packings)
    said = [any("no keys are late" in note for note in found.notes) for found in (late, plain)]
    assert said == [True, False]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_left_changes_nothing(family: str, late: bool, make: Callable, words: Any) -> None:
    small: Any = compress(make(family), keep_kv=0.5, inputs=words, late=late, step=1).module
    ids = words["input_ids"][:2, :6]
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(9) >= 3).long().expand(2, -1)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(small.generate(padded, attention_mask=mask, **options)[:, 3:], small.generate(ids, **options))
