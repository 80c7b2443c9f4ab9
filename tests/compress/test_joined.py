"""Joined keys: what is complex-linear at every frequency commutes with positions, and the best of it is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import deadweight
from deadweight.compress.joined import answers, as_complex, best_joined, moment_of_product, real_form
from deadweight.compress.run import compress as compress_any
from deadweight.slim.attention import Packing

compress = partial(compress_any, cache="low-rank")

PLANES, HEADS, JOINED = ((0, 2), (1, 3)), 4, 2  # two frequencies, four query heads on two key heads
ANGLES = torch.tensor([1.0, 0.1], dtype=torch.float64)
MEMBERS = torch.tensor([0, 0, 1, 1])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def at(position: int, states: Tensor) -> Tensor:
    """Planes of (…, 4), turned as at this position."""
    z = as_complex(states, PLANES) * torch.polar(torch.ones_like(ANGLES), position * ANGLES)
    return torch.cat([z.real, z.imag], -1)


def across_heads(mix: Tensor, keys: Tensor) -> Tensor:
    """A real map of both heads' places of each plane, (P, 2m, 2m), on keys (m, 4)."""
    found = keys.clone()
    for p, (a, b) in enumerate(PLANES):
        new = mix[p] @ torch.cat([keys[:, a], keys[:, b]])
        found[:, a], found[:, b] = new.split(JOINED)
    return found


def as_real(mix: Tensor) -> Tensor:
    return torch.cat([torch.cat([mix.real, -mix.imag], -1), torch.cat([mix.imag, mix.real], -1)], -2)


def test_a_complex_mix_of_heads_commutes_with_positions_and_a_real_one_does_not() -> None:
    keys, mix = normal(JOINED, 4, seed=0), as_real(torch.complex(normal(2, 2, 2, seed=1), normal(2, 2, 2, seed=2)))
    assert torch.allclose(across_heads(mix, at(7, keys)), at(7, across_heads(mix, keys)), atol=1e-12)
    other = mix.clone()
    other[:, JOINED:] = 0.0  # only the first halves of planes are mixed
    assert float((across_heads(other, at(7, keys)) - at(7, across_heads(other, keys))).abs().max()) > 0.1
    assert torch.allclose(across_heads(other, at(0, keys)), at(0, across_heads(other, keys)))


def samples(seed: int, tokens: int = 400) -> Tensor:
    """z of one frequency after the other, correlated between heads: F of every query head."""
    query, gradient = normal(1, HEADS, tokens, 4, seed=seed), normal(1, 1, tokens, 4, seed=seed + 1)
    gradient = torch.cat([gradient, gradient + 0.3 * normal(1, 1, tokens, 4, seed=seed + 2)], -1)
    z = answers(query, gradient.expand(-1, HEADS, -1, -1), PLANES, JOINED)[0]
    return z.transpose(1, 2) @ z / tokens


def loss_of(found: Any, moment: Tensor, count: int) -> float:
    """½ Σ xᵀFx with x = uD − e_j, spelled out."""
    numbers = found.kept(count)
    u = torch.zeros(HEADS, len(PLANES) * JOINED, dtype=torch.complex128)
    u[:, list(numbers)] = found.reads(count)
    x = torch.einsum("hpi,pij->hpj", u.view(HEADS, -1, JOINED), found.mix)
    x[torch.arange(HEADS), :, MEMBERS] -= 1.0
    real = torch.cat([x.real.flatten(1), x.imag.flatten(1)], 1)
    return float(0.5 * torch.einsum("hn,hnm,hm->", real, moment, real))


def test_the_loss_is_that_of_the_maps_that_are_found_and_joining_pays() -> None:
    moment = samples(3)
    found = best_joined(moment, MEMBERS, JOINED)
    for count in range(5):
        assert loss_of(found, moment, count) == pytest.approx(float(found.loss[count]), rel=1e-3, abs=1e-6)
    assert float(found.loss[4]) == 0.0 and bool((found.loss.diff() <= 1e-9).all())
    alike = found.loss[2] / found.loss[0]  # half of the numbers: the heads' gradients are nearly the same
    assert float(alike) < 0.1
    apart = moment.view(HEADS, 2, 2, JOINED, 2, 2, JOINED)
    dropped = sum(0.5 * apart[h, :, p, int(MEMBERS[h]), :, p, int(MEMBERS[h])].trace() for h in (2, 3) for p in (0, 1))
    assert float(found.loss[2]) < 0.5 * float(dropped)  # no better: the second head's planes gone, nothing made up


def test_other_ways_to_read_what_is_kept_lose_more() -> None:
    moment = samples(11)
    found = best_joined(moment, MEMBERS, JOINED)
    best, numbers = loss_of(found, moment, 3), found.reads(3)
    for seed in range(20):
        noise = torch.complex(normal(*numbers.shape, seed=seed), normal(*numbers.shape, seed=seed + 50))
        near = type(
            "Near", (), {"kept": found.kept, "mix": found.mix, "reads": lambda _, n, x=noise: numbers + 0.2 * x}
        )
        assert loss_of(near(), moment, 3) > best


def test_keys_of_one_size_whatever_the_query_have_the_moment_of_a_product() -> None:
    keys = torch.complex(normal(1, 2, 2, 2, seed=0), normal(1, 2, 2, 2, seed=1))
    keys, sizes = (keys @ keys.mH).expand(HEADS, -1, -1, -1), normal(HEADS, 2, seed=2).abs()
    moment = moment_of_product(sizes, keys)
    x = torch.complex(normal(2, 2, seed=3), normal(2, 2, seed=4))  # the loss is ½ Σ_p E|q|² x kkᴴ xᴴ
    real = torch.cat([x.real.flatten(), x.imag.flatten()])
    wanted = sum(0.25 * sizes[1, p] * (x[p] @ keys[1, p] @ x[p].conj()).real for p in range(2))
    assert float(0.5 * real @ moment[1] @ real) == pytest.approx(float(wanted))
    mix = torch.linalg.qr(keys[0])[0]
    assert torch.allclose(real_form(mix) @ real_form(mix).T, torch.eye(8, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_key_heads_that_repeat_each_other_need_one_heads_keys(family: str, make: Callable, words: Any) -> None:
    """Joined, the second head's keys are free; alone, each head pays for its own."""
    model = make(family)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "k_proj" in name:
                p[8:] = p[:8]
            elif "query_key_value" in name:  # heads of query, key, value beside each other
                rows = p.view(4, 3, 8, *p.shape[1:])
                rows[:, 1] = rows[:1, 1].clone()
            elif "c_attn" in name:
                p[..., 32:64] = p[..., 32:40].clone().repeat((1,) * (p.ndim - 1) + (4,))
    joined = compress(model, keep_kv=0.7, inputs=words, step=1)
    alone = compress(model, keep_kv=0.7, inputs=words, step=1, merge=1)
    assert joined.judgement.error < 0.5 * alone.judgement.error
    packings = [m for m in joined.module.modules() if isinstance(m, Packing)]
    assert len(packings) == 2 and all(p.joined == p.key_heads for p in packings)


def test_positions_further_on_give_the_same_scores(make: Callable, words: Any) -> None:
    """What is kept turns as it did: only distances count."""
    small: Any = compress(make("llama").double(), keep_kv=0.5, inputs=words, step=1).module
    ids = words["input_ids"][:2]
    far = torch.arange(20, 52)[None].expand(2, -1)
    with torch.no_grad():
        near = small(ids).logits
        assert torch.allclose(small(ids, position_ids=far).logits, near, atol=1e-5 * float(near.abs().max()))
        packing = small.model.layers[0].self_attn.packing
        packing.query_places[:] = packing.query_places.roll(1)  # a plane's halves from two frequencies
        wrong = small(ids).logits
        assert float((small(ids, position_ids=far).logits - wrong).abs().max()) > 1e-3 * float(wrong.abs().max())


@pytest.mark.parametrize("late", [False, True])
def test_joined_rotary_keys_generate_the_same_with_every_cache(
    late: bool, make: Callable, words: Any, tmp_path: Path
) -> None:
    make("llama").save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "small", keep_kv=0.5, inputs=words, step=1, late=late)
    ours: Any = deadweight.load(tmp_path / "small")
    elsewhere = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True).eval()
    ids = words["input_ids"][:2, :6]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    wanted = ours.generate(ids, do_sample=False, **options)
    assert torch.equal(elsewhere.generate(ids, do_sample=False, **options), wanted)
    assert torch.equal(ours.generate(ids, do_sample=False, use_cache=False, **options), wanted)
    assert torch.equal(ours.generate(ids, do_sample=False, cache_implementation="static", **options), wanted)
    beams = [ours.generate(ids, num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(9) >= 3).long().expand(2, -1)
    assert torch.equal(ours.generate(padded, attention_mask=mask, do_sample=False, **options)[:, 3:], wanted)
    with torch.no_grad():
        compiled = torch.compile(ours, backend="aot_eager")(ids, use_cache=False).logits
        assert torch.allclose(compiled, ours(ids, use_cache=False).logits, atol=1e-4)
