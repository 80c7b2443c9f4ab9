"""Saturation: the measured numbers are those of the model's own attention; slopes and verdicts are checked by hand."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from deadweight.audit.run import one_thread
from deadweight.cli import main
from deadweight.errors import DeadweightError
from deadweight.saturation import attention_rows as rows_module
from deadweight.saturation.attention_rows import LEAST, Column, sample_positions
from deadweight.saturation.run import lengths_up_to, saturation
from deadweight.saturation.slopes import AtLength, Head, LayerSlopes, factors, layer_of, verdict_of

SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SHARED = {**SIZE, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64, "bos_token_id": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(**GPT2, eos_token_id=2)),
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**SHARED)),
    "gemma2": lambda: T.Gemma2ForCausalLM(
        T.Gemma2Config(**SHARED, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, attn_logit_softcapping=2.0)
    ),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SIZE)),
}
Said = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """A small model of bytes, with logits large enough to matter."""

    def made(name: str, change: Callable[[Any], None] = lambda model: None) -> str:
        torch.manual_seed(0)
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
            change(model)
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return made


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times, " * 8)
    return str(tmp_path / "t.txt")


def attention_of(folder: str, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    auto = T.AutoModelForMaskedLM if folder.endswith("bert") else T.AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager", dtype="float64").eval()
    with torch.no_grad():
        return tuple(model(ids, output_attentions=True).attentions)


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_that_of_the_models_own_attention(name: str, folder: Callable[..., str], text: str) -> None:
    made = folder(name)
    found = saturation(made, text, length=32, windows=2, rows=4, seed=3)
    ids = torch.tensor(list(Path(text).read_bytes()[:64])).view(2, 32)
    attention, causal = attention_of(made, ids), name != "bert"
    for layer, weights in zip(found.layers, attention, strict=True):
        if name == "gemma2" and [at.length for at in layer.heads[0].by_length] == [4, 8, 16]:
            continue  # a sliding window: tested below
        places = sample_positions(32, 4, 3, causal=causal)
        p = weights[:, :, places]  # windows × heads × rows × keys
        J = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
        norm = torch.linalg.eigvalsh(J)[..., -1]
        entropy, largest = -torch.xlogy(p, p).sum(-1), p.amax(-1)
        for head in layer.heads:
            at, mine = head.by_length[-1], (slice(None), head.head)
            assert (at.length, at.rows) == (32, 8)
            expected = [t[mine].mean() for t in (norm, norm.log(), entropy, largest)]  # the model ran in float32
            assert [at.norm, at.log_norm, at.entropy, at.largest] == pytest.approx([float(e) for e in expected], 1e-4)


def test_the_logit_range_is_that_of_the_visible_logits(folder: Callable[..., str], text: str) -> None:
    made = folder("llama")
    found = saturation(made, text, length=16, windows=2, rows=1)
    ids = torch.tensor(list(Path(text).read_bytes()[:32])).view(2, 16)
    for layer, weights in zip(found.layers, attention_of(made, ids), strict=True):
        logs = weights[:, :, -1].log()  # the last row sees all keys: its logits up to a constant
        expected = (logs.amax(-1) - logs.amin(-1)).mean(0)
        assert [h.by_length[-1].logit_range for h in layer.heads] == pytest.approx(expected.tolist(), 1e-4)


def test_a_head_without_queries_spreads_its_weights_and_saturates(folder: Callable[..., str], text: str) -> None:
    def no_query(model: Any) -> None:
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :8] = 0
            block.attn.c_attn.bias[:8] = 0

    found = saturation(folder("gpt2", no_query), text, windows=3)
    assert found.lengths == (4, 8, 16, 32, 64) and found.windows == 3
    for layer in found.layers:
        even, other = layer.heads[0], layer.heads[1]
        assert even.slope == pytest.approx(-1, abs=1e-6) and even.error == pytest.approx(0, abs=1e-6)
        assert (even.verdict, even.sure) == ("saturates", True) and even.range_slope == pytest.approx(0, abs=1e-6)
        assert even.by_length[-1].norm == pytest.approx(1 / 56, rel=0.15) and other.slope > -0.999


def test_a_sliding_window_has_no_rows_of_more_keys_than_it_sees(folder: Callable[..., str], text: str) -> None:
    found = saturation(folder("gemma2"), text, windows=2)
    lengths = [[at.length for at in layer.heads[0].by_length] for layer in found.layers]
    assert sorted(lengths, key=len) == [[4, 8, 16], [4, 8, 16, 32, 64]]
    assert found.notes == ("layer 0 has a sliding window: its longest rows have 16 keys",)


def test_only_rows_that_are_looked_at_are_ever_formed(
    folder: Callable[..., str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = rows_module.softmax_norm
    monkeypatch.setattr(rows_module, "softmax_norm", lambda p: (sizes.append(p.shape), original(p))[1])
    saturation(folder("llama"), text, windows=2, rows=3)
    assert max(math.prod(s) for s in sizes) == 4 * 3 * 64 and all(s[-2] <= 3 and s[0] == 1 for s in sizes)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [4, 8, 100, 1024])
def test_places_are_different_end_with_the_last_and_belong_to_their_length(length: int, causal: bool) -> None:
    places = sample_positions(length, 16, 0, causal=causal)
    assert places[-1] == length - 1 and (places.diff() > 0).all() and len(places) <= 16
    assert not causal or (4 * (places + 1) > 3 * length).all()
    assert torch.equal(places, sample_positions(length, 16, 0, causal=causal))


def made_rows(length: int, log_norm: list[float]) -> torch.Tensor:
    """One head, one row of each window."""
    columns = {"log_length": math.log(length), "logit_range": 2 * math.log(length)}
    told = [[columns.get(name, y) for name in Column.__members__] for y in log_norm]
    return torch.tensor(told)[:, None, None]


def test_slope_and_error_are_those_of_the_windows() -> None:
    lengths = (4, 8, 16, 32)
    slopes = [-1.0, -0.8, -0.6]
    head = layer_of("a", {n: made_rows(n, [s * math.log(n) for s in slopes]) for n in lengths}).heads[0]
    assert head.slope == pytest.approx(-0.8, abs=1e-6) and head.error == pytest.approx(0.2 / 3**0.5, abs=1e-6)
    assert head.range_slope == pytest.approx(2, abs=1e-5)
    assert (head.verdict, head.sure) == ("saturates", False)
    assert head.by_length[0].log_norm_quantiles[1] == pytest.approx(-0.8 * math.log(4), abs=1e-6)


def test_two_lengths_give_no_slope() -> None:
    head = layer_of("a", {n: made_rows(n, [0.0, 0.0]) for n in (4, 8)}).heads[0]
    assert (head.slope, head.verdict, head.sure) == (None, "too short", False)


@pytest.mark.parametrize(
    ("slope", "verdict"),
    [(-1, "saturates"), (-0.75, "saturates"), (-0.74, "partly"), (-0.25, "partly"), (0, "flat"), (0.26, "grows")],
)
def test_verdicts_change_where_the_criterion_says(slope: float, verdict: str) -> None:
    assert verdict_of(slope) == verdict


def test_factors_are_one_for_the_most_sensitive_layer_and_fall_with_the_norm() -> None:
    def layer(norm: float) -> LayerSlopes:
        at = AtLength(64, 1, norm, 0, (), 0, 0, 0, 0)
        return LayerSlopes("a", (Head(0, 0, 0, 0, 0, (at,)),))

    found = factors([layer(n) for n in (0.25, 0.25 / 5, 0.25 / 25, 0.0)], decay=25, least=0.125)
    assert found == pytest.approx((1, 0.5, 0.125, 0.125))


@pytest.mark.parametrize(("longest", "lengths"), [(16, (4, 8, 16)), (24, (4, 8, 16, 24))])
def test_lengths_double_up_to_the_longest(longest: int, lengths: tuple[int, ...]) -> None:
    assert lengths_up_to(longest) == lengths


def test_a_norm_that_rounding_hides_counts_as_the_last_place(folder: Callable[..., str], text: str) -> None:
    def hard(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 1e4

    found = saturation(folder("llama", hard), text, length=16, windows=2)
    assert min(h.by_length[-1].log_norm for x in found.layers for h in x.heads) == pytest.approx(math.log(LEAST), 1e-3)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*arguments: Any) -> Said:
        monkeypatch.setattr(sys, "argv", ["deadweight", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return call


def test_the_command_prints_plots_and_writes_what_a_plan_reads(run: Callable[..., Said], tmp_path: Path) -> None:
    data, plot = tmp_path / "s.json", tmp_path / "s.svg"
    words = ["saturation", "demo", "--length", 16, "--windows", 2, "--rows", 4]
    code, out, err = run(*words, "--json", data, "--plot", plot)
    assert (code, err) == (0, "") and "of 12 heads, " in out and "note: measured on the prose" in out
    assert plot.read_text().startswith("<?xml")
    told = json.loads(data.read_text())
    assert len(told["factors"]) == 4 and max(told["factors"]) == 1 and told["lengths"] == [4, 8, 16]
    head = told["layers"][3]["heads"][1]
    assert head["by_length"]["length"] == told["lengths"] and len(head["by_length"]["log_norm_quantiles"][0]) == 3
    assert json.loads(run(*words, "--json", "-")[1]) == told
    assert "verdict" in run(*words, "--heads")[1]
    code, out, _ = run("allocate", "plan", "--profile", "power:1", "--token-dim", 16, "--saturation", data)
    assert code == 0 and f"{told['factors'][0]:g}" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --length 512", "found windows of 512 tokens; demo takes 2 to 256"),
        ("demo --length 8", "found a longest length of 8; expected 16 or more"),
        ("demo --text short.txt", "expected at least 512, two windows of 256: give more text"),
        ("demo --text missing.txt", "missing.txt does not exist"),
        ("demo --windows 1", "found 1 windows; expected two or more"),
        ("demo --rows 0", "found 0 rows for each length"),
        ("demo --plot s.exe", "expected a name that ends in .svg or .png"),
        ("words", "has 99 tokens and no tokenizer in its folder"),
        ("broken", "model.layers.1.self_attn has NaN or infinity in its queries or keys"),
        ("mamba", "mamba does not call softmax attention through transformers' attention interface"),
        ("vit", "vit does not take input_ids; expected a language model"),
    ],
)
def test_an_impossible_request_is_one_line_and_exit_status_two(
    run: Callable[..., Said],
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short" * 30)
    if (make := BAD.get(arguments)) is not None:
        torch.manual_seed(0)
        make().save_pretrained(tmp_path / arguments)
        capsys.readouterr()
    code, out, err = run("saturation", *arguments.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def not_finite() -> Any:
    model = MODELS["llama"]()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e38
        model.model.layers[0].mlp.up_proj.weight *= 1e6
    return model


IMAGE = {k: v for k, v in SIZE.items() if k not in ("vocab_size", "max_position_embeddings")}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 256, "state_size": 4}
BAD: dict[str, Callable[[], Any]] = {
    "words": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**SHARED, "vocab_size": 99})),
    "broken": not_finite,
    "mamba": lambda: T.MambaForCausalLM(T.MambaConfig(**MAMBA)),
    "vit": lambda: T.ViTModel(T.ViTConfig(**IMAGE, image_size=32, patch_size=8)),
}


def test_a_plan_refuses_a_file_without_factors(run: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"lags": []}')
    code, _, err = run("allocate", "plan", "--profile", "flat", "--saturation", tmp_path / "other.json")
    assert code == 2 and "or one that deadweight saturation --json wrote" in err


def test_an_attention_with_unknown_parts_is_refused(
    folder: Callable[..., str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise NotImplementedError("attention with sinks, which compressed heads do not know")

    monkeypatch.setattr("deadweight.compress.attention_calls.options_of", refuse)
    with pytest.raises(DeadweightError, match=r"has attention with sinks.*cannot be observed"):
        saturation(folder("llama"), text)
