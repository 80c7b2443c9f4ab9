"""Profiles: assumed, from files with all their mistakes, measured on texts whose answer is known, and by attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from deadweight.allocate.profile import from_file, read_profile
from deadweight.allocate.profile_from_model import attention_by_lag, measure_model
from deadweight.allocate.profile_from_text import effective_tokens, lag_norms, measure_text
from deadweight.errors import DeadweightError
from deadweight.transformer import TransformerConfig, TransformerForCausalLM


def test_assumed_profiles_are_what_their_names_say() -> None:
    assert read_profile("power:2", 3).values == pytest.approx((1, 1 / 4, 1 / 9))
    assert read_profile("exponential:2", 3).values == pytest.approx((1, np.exp(-0.5), np.exp(-1)))
    assert read_profile("flat", 4).values == (1.0,) * 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "lag,norm\n2,0.5\n1,1\n\n3,0\n"),
        ("p.csv", "\ufeffnorm, lag\n1,1\n0.5,2\n0,3\n"),
        ("p.json", "[1, 0.5, 0]"),
        ("p.json", '[{"lag": 1, "norm": 1}, {"lag": 3, "norm": 0}, {"lag": 2, "norm": 0.5}]'),
    ],
)
def test_a_profile_is_read_from_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert from_file(tmp_path / name).values == (1.0, 0.5, 0.0)
    assert read_profile(str(tmp_path / name), 2).values == (1.0, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.csv", "lag,value\n1,1\n", "has the columns lag, value; expected lag and norm"),
        ("p.csv", "lag,norm,extra\n1,1,1\n", "has the columns lag, norm, extra"),
        ("p.csv", "", "has the columns none"),
        ("p.csv", "lag,norm\n1,nan\n", "found 'nan' for lag 1"),
        ("p.csv", "lag,norm\n1,\n", "found '' for lag 1"),
        ("p.csv", "lag,norm\n1,-2\n", "found -2.0 at lag 1"),
        ("p.csv", "lag,norm\n1,1\n1,2\n", "found lag 1 in row 2"),
        ("p.csv", "lag,norm\n1,1\n3,2\n", "has no lag 2"),
        ("p.csv", "lag,norm\n0.5,1\n", "found lag 0.5"),
        ("p.csv", "lag,norm\n", "found no lags"),
        ("p.json", "[1, NaN]", "found nan for lag 2"),
        ("p.json", "[1, true]", "found True for lag 2"),
        ("p.json", "[0, 0]", "2 lags, all zero"),
        ("p.json", "{", "is not valid JSON"),
        ("p.json", "[1, 1" + "0" * 400 + "]", "for lag 2; expected a number"),
        ("p.json", "7", "holds int; expected a list"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DeadweightError) as refused:
        from_file(tmp_path / name)
    assert words in str(refused.value) and name in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["power", "power:x", "power:-1", "exponential:0", "nothing", "text", "missing.csv"])
def test_a_name_that_is_no_profile_is_refused(name: str) -> None:
    with pytest.raises(DeadweightError):
        read_profile(name)


def markov_chain(n: int) -> np.ndarray:
    random = np.random.default_rng(0)
    steps = np.cumsum(random.dirichlet(np.ones(5) * 0.3, 5), 1)
    found, draws = [0], random.random(n)
    for draw in draws:
        found.append(int(np.searchsorted(steps[found[-1]], draw)))
    return np.array(found)


def copies(n: int, lag: int) -> np.ndarray:
    """Half of the tokens are the one so far back."""
    random = np.random.default_rng(1)
    found, same = list(random.integers(0, 6, lag)), random.random(n) < 0.5
    for keep, other in zip(same, random.integers(0, 6, n), strict=True):
        found.append(found[-lag] if keep else int(other))
    return np.array(found)


def test_a_markov_chain_depends_on_the_last_token_alone() -> None:
    """Though the token three back tells much about the next one."""
    chain = markov_chain(40_000)
    pairs = np.histogram2d(chain[3:], chain[:-3], bins=5)[0] / (len(chain) - 3)
    expected = np.outer(pairs.sum(1), pairs.sum(0))
    assert (pairs * np.log(np.maximum(pairs, 1e-12) / expected)).sum() > 0.01  # nats; chance alone would give 2e-4
    first, *others = lag_norms(chain, 6)
    assert first > 0.3 and max(others) < 0.04 * first


def test_what_is_copied_from_three_back_shows_at_lag_three() -> None:
    norms = lag_norms(copies(40_000, 3), 6)
    assert norms.index(max(norms)) == 2
    assert norms[2] == pytest.approx(0.5 * (1 - 1 / 6) ** 0.5, rel=0.05)  # A = ½·I, and ‖e‖² is 5/6 on average
    assert max(norms[:2] + norms[3:]) < 0.1 * norms[2]


def test_noise_has_no_profile() -> None:
    """One fit alone would see something at every lag: here most lags are nothing, and none is much."""
    norms = np.array([lag_norms(np.random.default_rng(seed).integers(0, 8, 20_000), 6) for seed in range(4)])
    assert np.median(norms) < 0.005 and norms.max() < 0.02  # the fit of one half alone: 0.02 to 0.03 at every lag


def test_a_text_is_measured_with_its_own_token_dimension() -> None:
    found = measure_text("embedded", 16)
    assert list(found.values[:6]) == sorted(found.values[:6], reverse=True)
    assert found.values[0] > 5 * found.values[10] > 0
    assert found.d_token == 16
    assert effective_tokens(np.arange(10)) == 10


def test_a_text_that_is_too_short_or_repeats_one_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a few words, and a few more", encoding="utf-8")
    with pytest.raises(DeadweightError, match="has 27 tokens; expected 2,560 or more for 32 lags"):
        measure_text(str(file), 32)
    with pytest.raises(DeadweightError, match="repeats a single token"):
        lag_norms(np.zeros(10_000, dtype=np.int64), 4)


CONFIGS = {
    "gpt2": lambda **o: GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=50, n_positions=24, **o)),
    "llama": lambda **o: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            vocab_size=50,
            max_position_embeddings=24,
            **o,
        )
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_watched_attention_is_the_attention_of_the_eager_model(family: str) -> None:
    torch.manual_seed(0)
    watched = CONFIGS[family](attn_implementation="sdpa").eval()
    eager = CONFIGS[family](attn_implementation="eager").eval()
    eager.load_state_dict(watched.state_dict())
    ids, lags = torch.randint(0, 50, (6, 20)), 5
    found = attention_by_lag(watched, ids, lags)
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True, use_cache=False).attentions
    expected = [
        [float(torch.stack([a[:, :, t, t - m + 1] for t in range(lags, 20)]).mean()) for m in range(1, lags + 1)]
        for a in attentions
    ]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)


def test_our_own_transformer_is_watched_too() -> None:
    config = TransformerConfig(d_model=16, n_layers=3, heads=4, key_heads=2, vocab_size=50, context=24)
    found = attention_by_lag(TransformerForCausalLM(config).eval(), torch.randint(0, 50, (2, 20)), 4)
    assert found.shape == (3, 4) and torch.all(found > 0.02) and torch.all(found < 0.2)  # near to uniform


def test_a_model_whose_attention_cannot_be_seen_is_refused() -> None:
    eager = CONFIGS["gpt2"](attn_implementation="eager").eval()
    with pytest.raises(DeadweightError, match="calls no scaled_dot_product_attention"):
        attention_by_lag(eager, torch.randint(0, 50, (2, 20)), 4)


@pytest.mark.filterwarnings("ignore")
def test_the_embedded_model_attends_a_few_tokens_back() -> None:
    found = measure_model("demo", 12)
    assert sum(found.values[:5]) > 4 * sum(found.values[5:10]) and "first 1 of 4 layers" in found.source
    with pytest.raises(DeadweightError, match="expected at most 255 lags"):
        measure_model("demo", 5000)


def test_a_profile_in_json_survives_a_round_trip(tmp_path: Path) -> None:
    values = read_profile("power:1.3", 8).values
    (tmp_path / "p.json").write_text(json.dumps(values), encoding="utf-8")
    assert from_file(tmp_path / "p.json").values == values
