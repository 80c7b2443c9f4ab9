"""A model with smaller heads computes what was measured: with its cache and without, in memory and from the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import deadweight
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.result import Compression
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError

from .conftest import MODELS

CAUSAL = [name for name in MODELS if name not in ("bert", "roberta", "vit", "whisper")]
ENCODERS = ("bert", "roberta", "vit")


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("family", CAUSAL)
def test_smaller_heads_with_a_cache_give_what_they_give_without(family: str, make: Callable, words: Any) -> None:
    model = make(family)
    found = compress(model, keep_attention=0.6, inputs=words, step=1)
    assert found.share <= 0.6 and found.kv_after < found.kv_before and 0 < found.judgement.error < 10
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
    assert stored == 2 * 12 * found.kv_after


@pytest.mark.parametrize("family", [*CAUSAL, "whisper"])
def test_keeping_everything_changes_nothing(family: str, make: Callable, words: Any) -> None:
    """The same function, in float64."""
    model = make(family).double()
    inputs = words
    if family == "whisper":
        sound = torch.randn(8, 8, 100, generator=torch.Generator().manual_seed(0)).double()
        inputs = {"input_features": sound, "decoder_input_ids": words["input_ids"][:8]}
    found = compress(model, keep_attention=1.0, inputs=inputs)
    batch = {n: t[:4].double() if t.is_floating_point() else t[:4] for n, t in inputs.items()}
    with torch.no_grad():
        a, b = model(**batch).logits, found.module(**batch).logits  # type: ignore[misc]
    exact = 1e-6 if family == "gemma2" else 1e-8  # with a soft-cap transformers takes its softmax in float32
    assert found.share == 1.0 and float((a - b).abs().max()) < exact * float(a.abs().max())


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_lose_attention_weights(family: str, make: Callable, words: Any) -> None:
    found = compress(make(family), keep_attention=0.5, inputs=images() if family == "vit" else words, step=1)
    assert found.parameters_after < found.parameters_before and found.share <= 0.5
    gone = found.parameters_before - found.parameters_after
    assert gone >= 0.5 * 2 * 4 * 32 * 32  # half of the weights of two attentions
    assert found.judgement.error < 1


def test_a_module_that_is_given_stays_as_it_is(make: Callable, words: Any) -> None:
    model = make("llama").to(torch.bfloat16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = compress(model, keep_attention=0.5, inputs=words)
    assert found.module is not model and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in model.state_dict().items())


def test_more_budget_costs_less(make: Callable, words: Any) -> None:
    model = make("llama")
    errors = [compress(model, keep_attention=share, inputs=words, step=1).judgement.error for share in (0.3, 0.6, 0.9)]
    assert errors[0] > errors[1] > errors[2] > 0


def test_the_knapsack_predicts_no_more_than_equal_shares(make: Callable, words: Any) -> None:
    model = make("llama")
    found = {
        m: compress(model, keep_attention=0.5, inputs=words, step=1, method=m) for m in ("knapsack", "layer", "uniform")
    }
    assert found["knapsack"].predicted <= found["layer"].predicted <= found["uniform"].predicted


@pytest.fixture
def small(tmp_path: Path) -> Path:
    compress("demo", tmp_path / "small", keep_attention=0.5, windows=8, length=64)
    return tmp_path / "small"


def test_a_compressed_folder_loads_here_and_elsewhere_and_generates(small: Path, tmp_path: Path) -> None:
    ours: Any = deadweight.load(small)
    remote = transformers.AutoModelForCausalLM.from_pretrained(small, trust_remote_code=True).eval()
    ids = torch.tensor([list(b"The function returns ")])
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, remote(ids).logits)
    wanted = ours.generate(ids, **options)
    assert torch.equal(remote.generate(ids, **options), wanted)
    assert torch.equal(ours.generate(ids, use_cache=False, **options), wanted)
    assert torch.equal(ours.generate(ids, cache_implementation="static", **options), wanted)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    assert torch.equal(ours.generate(padded, attention_mask=mask, **options)[:, 3:], wanted)
    ours.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(deadweight.load(tmp_path / "again")(ids).logits, ours(ids).logits)
    about = json.loads((small / "deadweight.json").read_text())
    assert about["kv_numbers_per_token"]["after"] < about["kv_numbers_per_token"]["before"]
    assert about["budget"] == {"what": "attention", "asked": 0.5, "share": 0.5}
    assert set(about["kept"]["transformer.h.0.attn"]) == {"values", "non_rotary", "rotary_pairs"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("family", ["llama", "ours", "qwen3", "gemma2", "gpt_neox"])
def test_the_written_model_is_the_measured_model(
    family: str, make: Callable, words: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the class has no place for a bias that the means of dropped values go into."""
    compress(make(family), tmp_path / "out", inputs=words, keep_attention=0.5, step=1)
    found: Any = compress(make(family), inputs=words, keep_attention=0.5, step=1)
    loaded: Any = deadweight.load(tmp_path / "out")
    batch = words["input_ids"][:4]
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch).logits, found.module(batch).logits)
        found.module.save_pretrained(tmp_path / "saved")
        torch.testing.assert_close(deadweight.load(tmp_path / "saved")(batch).logits, found.module(batch).logits)  # type: ignore[operator]
    assert "UNEXPECTED" not in caplog.text and "MISSING" not in caplog.text
    assert sum(p.numel() for p in loaded.parameters()) == found.parameters_after


def test_plain_transformers_refuses_a_compressed_folder(small: Path) -> None:
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.GPT2LMHeadModel.from_pretrained(small)


def test_stock_loads_with_plain_transformers_and_computes_the_same(tmp_path: Path) -> None:
    compress("demo", tmp_path / "stock", keep_attention=0.5, layout="stock", windows=8, length=64)
    found: Any = compress("demo", keep_attention=0.5, layout="stock", windows=8, length=64)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    ids = torch.tensor([list(b"The function returns ")])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, found.module(ids).logits, atol=1e-4)
    assert found.parameters_after == found.parameters_before and any("stock" in note for note in found.notes)


def test_llama_in_stock_form_has_smaller_heads_and_a_smaller_cache(make: Callable, words: Any, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "stock", keep_attention=0.5, layout="stock", inputs=words)
    found: Any = compress(tmp_path / "model", keep_attention=0.5, layout="stock", inputs=words)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert plain.config.head_dim == 4 and found.kv_after == found.kv_before // 2 and found.share == 0.5
    ids = words["input_ids"][:2]
    with torch.no_grad():
        out = plain(ids, use_cache=True)
        assert torch.allclose(out.logits, found.module(ids).logits, atol=1e-5)
        assert out.past_key_values.layers[0].keys.shape[-1] == 4
        assert found.module.config._attn_implementation in ("eager", "sdpa")  # no code of ours is left in it
        far = torch.arange(30, 62)[None].expand(2, -1)  # the kept pairs turn as they did
        assert torch.allclose(plain(ids, position_ids=far).logits, out.logits, atol=1e-4)


def test_without_a_bias_for_them_means_are_kept_in_the_values(make: Callable, words: Any) -> None:
    """Qwen3's output projection has no bias: in stock form, where only values are cut, their mean must not be lost."""
    model = make("qwen3")
    with torch.no_grad():  # tokens that are nearly alike: the mean is most of what the values hold
        model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight.mean(0) + 0.02 * torch.randn(99, 32)
    found = compress(model, keep_attention=0.75, layout="stock", inputs=words, step=1)
    assert all(k.pairs == (4, 4) for k in found.kept.values()) and found.judgement.error < 0.04  # without them 0.09


def test_a_compressed_model_compiles(small: Path) -> None:
    model = deadweight.load(small)
    ids = torch.tensor([list(b"The function returns ")])
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    assert torch.allclose(eager, compiled, atol=1e-3)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_compiled_model_decodes_from_a_static_cache(share: float, make: Callable, words: Any) -> None:
    model: Any = compress(make("llama"), keep_attention=share, inputs=words).module
    ids = words["input_ids"][:2, :8]

    def steps(forward: Callable) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            model(ids[:, :5], past_key_values=cache, use_cache=True)
            return torch.cat([forward(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, 8)], 1)

    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 5:]
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        assert torch.allclose(steps(forward), wanted, atol=1e-4)


BAD = [
    ({"keep_attention": 0.0}, "found --keep-attention 0.0; expected a share above 0 and at most 1"),
    ({"keep_attention": 1.5}, "found --keep-attention 1.5; expected a share above 0 and at most 1"),
    ({"keep_attention": 0.001}, "found --keep-attention 0.001; the least that these heads can be cut to is"),
    ({"keep_attention": 0.5, "max_loss": 0.1}, "found several budgets; expected one of"),
    ({"max_loss": -1.0}, "found --max-loss -1.0; expected nats per token above 0"),
    ({"keep_attention": 0.5, "windows": 1}, "found 1 calibration windows; expected two or more"),
    ({"keep_attention": 0.5, "batch": 0}, "found --batch 0; expected 1 or more"),
    ({"keep_attention": 0.5, "length": 100_000}, "found windows of 100,000 tokens; demo takes 2 to 256"),
    ({"keep_attention": 0.5, "curve": True}, "found --curve, an option for coded caches; expected it without --keep"),
    *(
        (
            {**option, "layout": "stock"},
            "with --layout stock, in which no cache can be coded; expected --keep-attention",
        )
        for option in ({"keep_kv": 0.5}, {"bits": 4}, {"max_loss": 0.1}, {"curve": True}, {"keys": "pair"})
    ),
    ({"cache": "low-rank"}, "found an option that compress does not have"),
    ({"late": True}, "found an option that compress does not have"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_an_impossible_budget_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match=message):
        compress("demo", tmp_path / "out", **{"windows": 4, "length": 32, **options})
    assert not (tmp_path / "out").exists()


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(DeadweightError, match=r"short.txt gives 10 tokens; expected at least 64, two windows of 32"):
        compress("demo", keep_attention=0.5, text=str(tmp_path / "short.txt"), length=32)


def test_activations_that_are_not_finite_are_refused(make: Callable, words: Any) -> None:
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = float("nan")
    with pytest.raises(DeadweightError, match="not finite"):
        compress(model, keep_attention=0.5, inputs=words)


def test_an_encoder_has_no_cache_to_keep(make: Callable, words: Any) -> None:
    with pytest.raises(DeadweightError, match="has no key-value cache; use --keep-attention"):
        compress(make("bert"), keep_kv=0.5, inputs=words)


def test_the_cache_behind_an_encoder_of_sounds_is_refused_with_what_to_use_instead(make: Callable, words: Any) -> None:
    with pytest.raises(DeadweightError, match=r"behind an encoder that does not read tokens.*Use --keep-attention"):
        compress(make("whisper"), keep_kv=0.5, inputs=words)


def test_without_a_budget_caches_are_coded_and_other_heads_get_smaller(make: Callable, words: Any) -> None:
    assert isinstance(compress(make("llama"), inputs=words), CacheCompression)
    for model, layout in (("bert", "slim"), ("llama", "stock")):
        found = compress(make(model), inputs=words, layout=layout, step=1)
        assert isinstance(found, Compression) and 0.6 < found.share <= 0.75 and found.asked is None


def test_a_slim_model_is_refused(small: Path) -> None:
    with pytest.raises(DeadweightError, match="is slim already; expected an original or a stock checkpoint"):
        compress(small, keep_attention=0.5)


@pytest.mark.parametrize("option, value", [("layout", "thin"), ("method", "greedy")])
def test_an_unknown_choice_is_refused(option: str, value: str, make: Callable, words: Any) -> None:
    with pytest.raises(DeadweightError, match=f"found {option}='{value}'; expected "):
        compress(make("llama"), inputs=words, keep_attention=0.5, **{option: value})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ids: {"pixels": ids.float()},
        lambda ids: {"input_ids": ids + 99},
        lambda ids: {"input_ids": ids.float()},
    ],
    ids=["a name it does not know", "tokens beyond its vocabulary", "numbers that are no tokens"],
)
def test_inputs_that_the_model_cannot_read_are_refused(
    wrong: Callable, make: Callable, words: Any, tmp_path: Path
) -> None:
    with pytest.raises(DeadweightError, match="does not run on the calibration inputs") as told:
        compress(make("llama"), tmp_path / "out", inputs=wrong(words["input_ids"]), keep_attention=0.5)
    assert "\n" not in str(told.value)
    assert not any(tmp_path.iterdir())


def test_speech_recognition_gives_the_same_with_a_packed_cache(make: Callable, words: Any) -> None:
    sound = torch.randn(4, 8, 100, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": sound, "decoder_input_ids": words["input_ids"][:4]}
    small: Any = compress(make("whisper"), inputs=inputs, keep_attention=0.5, step=1).module
    said = [
        small.generate(sound[:2], max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*said)
