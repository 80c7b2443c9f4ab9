"""Decoders behind an encoder: the caches of self-attention and of cross-attention are coded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import deadweight
from deadweight.compress.cache_result import CacheCompression, outcome_line
from deadweight.compress.cache_support import layers_of
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CURRENT, CodedLayer
from deadweight.slim.coder import Coder

from .conftest import BEHIND_ENCODERS, divergence

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def coded(model: Any, words: Any, **options: Any) -> CacheCompression:
    result = compress(model, inputs=words, **options)
    assert isinstance(result, CacheCompression)
    return result


def stepwise(model: Any, text: torch.Tensor, tokens: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
    """Logits of decoding one token after the other, and the cache."""
    past, steps = None, []
    encoded = model.get_encoder()(input_ids=text, **more)
    for token in tokens.split(1, 1):
        given = {"encoder_outputs": encoded, "decoder_input_ids": token, "past_key_values": past, **more}
        output = model(**given, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, 1), past


@pytest.mark.parametrize("family", BEHIND_ENCODERS)
def test_without_rounding_nothing_changes(family: str, make: Callable, words: Any) -> None:
    model = make(family).double()
    result = coded(model, words, keep_kv=1.0)
    small: Any = result.module
    assert len(result.caches) == 4, "two of self-attention, two of cross-attention"
    given = {"input_ids": words["input_ids"][:3], "decoder_input_ids": words["input_ids"][3:6, :20]}
    with torch.no_grad():
        wanted, rounded = model(**given).logits, small(**given, use_cache=False).logits
        for coder in (part for part in small.modules() if isinstance(part, Coder)):
            coder.rounds = False
        exact = small(**given, use_cache=False).logits
    size = float(wanted.abs().max())
    assert float((wanted - exact).abs().max()) < 1e-8 * size < float((wanted - rounded).abs().max()) < 0.1 * size


@pytest.mark.parametrize("family", BEHIND_ENCODERS)
def test_decoding_token_by_token_is_what_was_judged(family: str, make: Callable, words: Any) -> None:
    """The text of the encoder and the tokens of the decoder are not equally long."""
    small: Any = coded(make(family), words, keep_kv=0.3).module
    text, tokens = words["input_ids"][:2], words["input_ids"][2:4, :14]
    with torch.no_grad():
        whole = small(input_ids=text, decoder_input_ids=tokens, use_cache=False).logits
        steps, past = stepwise(small, text, tokens)
    assert torch.allclose(steps, whole, atol=1e-4 * float(whole.abs().max()))
    assert all(isinstance(layer, CodedLayer) and layer.keys.dtype == torch.uint8 for layer in layers_of(past))
    assert len(layers_of(past)) == 4 and CURRENT.call is None


@pytest.mark.parametrize("family", BEHIND_ENCODERS)
def test_padding_of_the_encoder_changes_nothing(family: str, make: Callable, words: Any) -> None:
    """On the right, as tokenizers of encoders pad."""
    small: Any = coded(make(family), words, keep_kv=0.3).module
    text, tokens = words["input_ids"][:1, :20], words["input_ids"][2:3, :14]
    padded = torch.cat([text, torch.zeros(1, 12, dtype=torch.long)], 1)
    mask = (torch.arange(32) < 20).long()[None]
    both = {"input_ids": torch.cat([padded, words["input_ids"][1:2]]), "attention_mask": torch.cat([mask, mask | 1])}
    with torch.no_grad():
        alone = small(input_ids=text, decoder_input_ids=tokens, use_cache=False).logits
        beside = small(**both, decoder_input_ids=tokens.expand(2, -1), use_cache=False).logits[:1]
        steps, _ = stepwise(small, padded, tokens, attention_mask=mask)
    size = float(alone.abs().max())
    assert torch.allclose(beside, alone, atol=1e-4 * size) and torch.allclose(steps, alone, atol=1e-4 * size)
    generated = [small.generate(text, **GREEDY), small.generate(**both, **GREEDY)[:1]]
    assert torch.equal(*generated)


@pytest.mark.parametrize("family", BEHIND_ENCODERS)
def test_a_written_folder_gives_the_same_logits(family: str, make: Callable, words: Any, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path / "in")
    result = coded(str(tmp_path / "in"), words, keep_kv=0.4)
    compress(str(tmp_path / "in"), tmp_path / "out", inputs=words, keep_kv=0.4)
    loaded: Any = deadweight.load(tmp_path / "out")
    remote = T.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    small: Any = result.module
    given = {"input_ids": words["input_ids"][:2], "decoder_input_ids": words["input_ids"][2:4, :14]}
    with torch.no_grad():
        expected = small(**given, use_cache=False).logits
        assert all(torch.equal(other(**given, use_cache=False).logits, expected) for other in (loaded, remote))
        assert not torch.allclose(expected, model(**given).logits, atol=1e-4)
    beams = [m.generate(given["input_ids"], num_beams=3, **GREEDY) for m in (loaded, remote)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("family", BEHIND_ENCODERS)
def test_the_loss_is_about_the_predicted_one(family: str, make: Callable, words: Any) -> None:
    model = make(family).double()
    result = coded(model, words, keep_kv=0.5)
    loss = divergence(model, result.module, {**words, "decoder_input_ids": words["input_ids"]})
    assert 0.5 * result.point.predicted < loss < 2 * result.point.predicted  # the second order alone, of few tokens
    name, judgement = next(iter(result.point.judgements.items()))
    held = words["input_ids"][-4:]
    with torch.no_grad():
        logits = model(input_ids=held, decoder_input_ids=held).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())
    assert judgement.loss_before == pytest.approx(float(expected), rel=1e-5)
    assert outcome_line(name, judgement).startswith(f"{name}: perplexity")


def test_smaller_heads_refuse_position_biases(make: Callable, words: Any) -> None:
    given = {**words, "decoder_input_ids": words["input_ids"]}
    with pytest.raises(DeadweightError, match="attention with position_bias, which compressed heads do not support"):
        compress(make("t5"), inputs=given, keep_attention=0.5)
