"""The transformer in all its shapes: cache, padding and initial weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from deadweight.source.randomise import randomise
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

EXACT = 1e-12  # relative, in float64: another order of summation leaves about 1e-15
SMALL = {"vocab_size": 13, "context": 24, "d_model": 8, "n_layers": 2, "heads": 2, "hidden": 12}
SMALL |= {"tie_word_embeddings": False}  # with random weights a tied readout repeats the last token
EVERY_BIAS = ["query", "key", "value", "output", "gate", "up", "down", "norm", "readout"]
DECODERS: dict[str, dict[str, Any]] = {
    "learned positions": {"biases": EVERY_BIAS},
    "a tied readout": {"biases": EVERY_BIAS, "tie_word_embeddings": True},
    "rotary positions": {"positions": "rotary"},
    "no positions": {"positions": "none"},
    "a shape for each layer": {
        "n_layers": 3,
        "heads": [1, 2, 4],
        "key_heads": [1, 1, 2],
        "d_qk": [8, 4, 6],
        "d_v": [4, 6, 2],
        "hidden": [5, 12, 8],
        "positions": "rotary",
    },
    "shared layers": {"shared_layers": True, "n_layers": 3},
    "identity query, key and value": {"query": "identity", "key": "identity", "value": "identity"},
    "identity in some layers": {"query": ["identity", "full"], "value": ["full", "identity"], "positions": "rotary"},
    "a learned scale": {"learned_scale": True, "scale": 0.7},
    "query-key norm": {"query_norm": True, "key_norm": True, "positions": "rotary", "key_heads": 1},
    "post-norm, gated": {"norm_place": "post", "norm": "rms", "activation": "swiglu", "embedding_norm": True},
    "no norm, one skip": {"norm": "none", "mlp_skip": False, "activation": "relu"},
    "norms without gains": {"norm_gain": False, "activation": "gelu_tanh"},
}


def decoder(name: str) -> TransformerForCausalLM:
    return randomise(TransformerForCausalLM(TransformerConfig(**SMALL | DECODERS[name])).eval())  # type: ignore[return-value]


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("name", DECODERS)
def test_the_model_generates_the_same_with_and_without_its_cache(name: str) -> None:
    model, start = decoder(name), tokens(6, 4)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = model.generate(start, use_cache=True, **options)
    assert written.shape == (6, 12) and torch.equal(written, model.generate(start, use_cache=False, **options))
    assert torch.equal(written, model.generate(start, cache_implementation="static", **options))
    assert written[:, 4:].unique().numel() > 1, "a model that repeats one token shows nothing"


@pytest.mark.parametrize("name", DECODERS)
def test_in_pieces_of_any_length_the_cache_gives_the_logits_of_the_whole(name: str) -> None:
    model, ids = decoder(name), tokens(2, 9)
    whole = model(ids, use_cache=False).logits
    cache, parts = None, []
    for piece in ids.split([3, 1, 4, 1], dim=1):
        found = model(piece, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.logits)
    assert gap(torch.cat(parts, 1), whole) < EXACT


@pytest.mark.parametrize("name", DECODERS)
def test_a_static_cache_longer_than_the_text_changes_nothing(name: str) -> None:
    model, ids = decoder(name), tokens(2, 9)
    whole = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    parts = [model(piece, past_key_values=cache).logits for piece in ids.split([3, 1, 4, 1], dim=1)]
    assert gap(torch.cat(parts, 1), whole) < EXACT


@pytest.mark.parametrize("name", DECODERS)
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = decoder(name)
    alone = [tokens(1, n, seed=n) for n in (6, 3, 1)]
    mask = torch.tensor([[0] * (6 - a.shape[1]) + [1] * a.shape[1] for a in alone])
    ids = torch.cat([torch.nn.functional.pad(a, (6 - a.shape[1], 0)) for a in alone])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for how in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
        together = model.generate(ids, attention_mask=mask, **how, **options)
        for row, one in zip(together, alone, strict=True):
            assert torch.equal(row[6:], model.generate(one, **options)[0, one.shape[1] :])


def test_without_a_mask_padding_is_text() -> None:
    model, ids = decoder("learned positions"), tokens(1, 3)
    padded = torch.nn.functional.pad(ids, (2, 0))
    seen, unseen = model(padded).logits[:, 2:], model(padded, attention_mask=(padded > 0).long()).logits[:, 2:]
    assert gap(seen, unseen) > 1e-3


@pytest.mark.parametrize("name", DECODERS)
def test_no_token_sees_a_later_one(name: str) -> None:
    model, ids = decoder(name), tokens(1, 8)
    other = ids.clone()
    other[:, 5:] = (ids[:, 5:] + 1) % SMALL["vocab_size"]
    a, b = model(ids).logits, model(other).logits
    assert gap(b[:, :5], a[:, :5]) < EXACT and gap(b[:, 5:], a[:, 5:]) > 1e-3


def test_each_use_of_a_shared_layer_has_its_own_place_in_the_cache() -> None:
    model = decoder("shared layers")
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    keys = [layer.keys for layer in cache.layers]
    assert len(model.transformer.layers) == 1 and len(keys) == 3
    assert all(gap(a, b) > 1e-3 for a, b in itertools.pairwise(keys))


def test_the_cache_holds_what_each_layer_needs() -> None:
    model = decoder("a shape for each layer")
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 1, 5, 8), (1, 1, 5, 4), (1, 2, 5, 6)]
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(1, 1, 5, 4), (1, 1, 5, 6), (1, 2, 5, 2)]


@pytest.mark.parametrize("name", ["learned", "rotary", "none"])
def test_an_encoder_does_not_see_padding(name: str) -> None:
    config = TransformerConfig(**SMALL, causal=False, positions=name, token_types=2, biases=EVERY_BIAS)
    model = randomise(TransformerForMaskedLM(config).eval())
    ids, types = tokens(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, -1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    padded = model(ids, attention_mask=mask, token_type_ids=types).logits
    for row, length in ((0, 6), (1, 4)):
        alone = model(ids[row : row + 1, :length], token_type_ids=types[:1, :length]).logits
        assert gap(padded[row : row + 1, :length], alone) < EXACT
    unmasked = model(ids, token_type_ids=types).logits
    assert gap(unmasked[1, :4], padded[1, :4]) > 1e-3
    assert gap(model(ids, attention_mask=mask).logits, padded) > 1e-3, "token types are read"


def test_every_token_of_an_encoder_sees_every_other() -> None:
    model = randomise(TransformerForMaskedLM(TransformerConfig(**SMALL, causal=False)).eval())
    ids = tokens(1, 6)
    other = ids.clone()
    other[:, 5] = (ids[:, 5] + 1) % SMALL["vocab_size"]
    assert gap(model(other).logits[:, 0], model(ids).logits[:, 0]) > 1e-3


def test_embeddings_may_be_given_for_tokens() -> None:
    model, ids = decoder("rotary positions"), tokens(2, 5)
    torch.testing.assert_close(model(inputs_embeds=model.transformer.tokens(ids)).logits, model(ids).logits)


def test_the_loss_is_that_of_the_next_token() -> None:
    model, ids = decoder("learned positions"), tokens(2, 5)
    logits = model(ids).logits
    wanted = -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    assert float(model(ids, labels=ids).loss.detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-5
    )  # taken in float32


def test_only_the_last_logits_are_made_when_asked_for() -> None:
    model, ids = decoder("learned positions"), tokens(2, 5)
    assert gap(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:]) < EXACT


def test_the_start_is_small_centred_and_smaller_where_it_adds_up() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=500, context=64, d_model=128, n_layers=8, heads=4, biases=EVERY_BIAS, learned_scale=True
    )
    model = TransformerForCausalLM(config)
    for name, p in ((n, p.detach()) for n, p in model.named_parameters()):
        if name.endswith(("bias", "log_scale")):
            assert not p.any(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            smaller = 4 if name.endswith(("output.weight", "down.weight")) else 1  # √(2 · 8 layers)
            n, wanted = p.numel(), 0.02 / smaller
            assert abs(float(p.std()) / wanted - 1) < 5 / (2 * n) ** 0.5, name  # five standard errors
            assert abs(float(p.mean())) < 5 * wanted / n**0.5, name


def test_the_deviation_of_the_initial_weights_can_be_set() -> None:
    torch.manual_seed(0)
    model = TransformerModel(TransformerConfig(d_model=64, heads=2, n_layers=2, init_std=0.1))
    assert float(model.tokens.weight.detach().std()) == pytest.approx(0.1, rel=0.05)
    assert float(model.layers[0].mlp.down.weight.detach().std()) == pytest.approx(0.05, rel=0.05)
