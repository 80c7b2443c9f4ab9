"""Healing brings the compressed model nearer to the original, and resumes where it was interrupted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import nn

import deadweight
from deadweight.cli import compress as command
from deadweight.compress import heal as healing
from deadweight.compress.calibration import CalibrationRequest, head_calibration, text_to_heal_on
from deadweight.compress.heal import Healing, blocks_of, distil, healing_folder
from deadweight.compress.judge import judge
from deadweight.compress.run import compress
from deadweight.compress.settings import CACHE_RATE, HEAD_RATE
from deadweight.errors import DeadweightError
from deadweight.source.model import open_complete


def batches(words: Any) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids} for ids in words["input_ids"].split(4)]


def test_healing_reduces_the_divergence_on_text_it_has_not_seen() -> None:
    options: dict[str, Any] = {"keep_attention": 0.25, "windows": 24, "length": 64, "text": "embedded"}
    found = compress("demo", heal=30, **options)
    assert found.judgement_before_healing is not None
    assert found.judgement.error < 0.95 * found.judgement_before_healing.error


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "whisper"])
def test_every_kind_of_model_learns_block_by_block_and_as_a_whole(family: str, make: Callable, words: Any) -> None:
    model = make(family)
    inputs = words
    if family == "whisper":
        sound = torch.randn(8, 8, 100, generator=torch.Generator().manual_seed(0))
        inputs = {"input_features": sound, "decoder_input_ids": words["input_ids"][:8]}
    small = compress(model, inputs=inputs, step=1, keep_attention=0.3).module
    batch = [{n: t[:4] for n, t in inputs.items()}]
    before = judge(model, small, batch).error
    distil(model, small, batch, Healing(30, rate=1e-4))
    assert judge(model, small, batch).error < 0.9 * before


def test_healing_that_raises_the_error_is_undone_and_reported() -> None:
    """The compressed model is close to the original, and two steps at a high rate take it away."""
    options: dict[str, Any] = {"keep_attention": 0.9, "windows": 16, "length": 64, "text": "embedded"}
    plain, found = compress("demo", **options), compress("demo", heal=2, **options)
    assert found.judgement.error == pytest.approx(plain.judgement.error, rel=1e-6)
    assert any("healing for 2 steps was undone" in note for note in found.notes)


def test_only_the_blocks_are_trained(make: Callable, words: Any) -> None:
    model = make("llama")
    small: Any = compress(model, keep_attention=0.5, inputs=words, step=1).module
    assert blocks_of(small) == ["model.layers.0", "model.layers.1"]
    before = small.model.embed_tokens.weight.clone()
    distil(model, small, batches(words), Healing(2))
    assert torch.equal(small.model.embed_tokens.weight, before)


def test_a_stock_model_is_healed_and_what_is_zero_stays_zero(make: Callable, words: Any) -> None:
    for family in ("llama", "gpt2"):  # one with heads that are really smaller, one that is filled up with zeros
        model = make(family)
        small: Any = compress(model, keep_attention=0.5, inputs=words, layout="stock").module
        before, zeros = judge(model, small, batches(words)[:1]).error, {n: p == 0 for n, p in small.named_parameters()}
        distil(model, small, batches(words)[:1], Healing(20))
        assert judge(model, small, batches(words)[:1]).error < 0.95 * before
        assert all((p[zeros[n]] == 0).all() for n, p in small.named_parameters())
    assert any(z.any() for z in zeros.values())


def test_a_state_belongs_to_its_weights_its_text_and_its_settings(make: Callable, words: Any, tmp_path: Path) -> None:
    model, text = make("llama"), batches(words)
    place = healing_folder(tmp_path / "out", model, text, (1, 2))
    assert place == healing_folder(tmp_path / "out", model, text, (1, 2))
    others = [
        healing_folder(tmp_path / "out", model, text[1:], (1, 2)),
        healing_folder(tmp_path / "out", model, text, 1),
    ]
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    others.append(healing_folder(tmp_path / "out", model, text, (1, 2)))
    assert len({place, *others}) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heal": -1}, "found --heal -1"),
        ({"heal": 2, "heal_rate": 0.0}, "found --heal-rate 0.0"),
        ({"heal_text": "embedded"}, "found --heal-text without --heal"),
        ({"heal": 2, "heal_text": "nosuch.txt"}, "nosuch.txt"),
    ],
)
def test_bad_healing_options_are_refused_before_any_work(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deadweight.compress.smaller_heads.locate", lambda *_: pytest.fail("it went on"))
    with pytest.raises(DeadweightError, match=said):
        compress("demo", keep_attention=0.5, **options)


def test_help_names_the_rates_of_the_library() -> None:
    (option,) = get_args(command.HealRateOption)[1:]
    assert [float(x) for x in re.findall(r"\de-\d", option.help)] == [HEAD_RATE, CACHE_RATE]


def test_steps_below_the_rounding_of_half_precision_are_not_lost(make: Callable, words: Any) -> None:
    """A step of 1e-5 is less than half of the last place of most weights in bfloat16; forty such steps are more."""
    model = make("llama").bfloat16()
    small: Any = compress(model, keep_attention=0.5, inputs=words, step=1).module.bfloat16()
    weights = [p for path in blocks_of(small) for p in small.get_submodule(path).parameters() if p.dim() == 2]
    before = [p.detach().clone() for p in weights]
    half_places = [2.0 ** (p.abs().float().log2().floor() - 8) for p in before]
    distil(model, small, batches(words), Healing(40, rate=1e-5))
    out_of_reach = torch.cat([(place > 1.1e-5).flatten() for place in half_places])
    changed = torch.cat([(p != q).flatten() for p, q in zip(weights, before, strict=True)])
    assert all(p.dtype == torch.bfloat16 for p in weights)
    assert out_of_reach.float().mean() > 0.3 and changed[out_of_reach].float().mean() > 0.1


def test_a_step_of_many_batches_is_a_step_of_one_large_batch(
    make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain gradient descent, so that weights differ by no more than gradients do."""
    monkeypatch.setattr(healing, "make_optimizer", lambda weights, rate: torch.optim.SGD(list(weights), lr=rate))
    model = make("llama").double()
    start, parts, whole = (
        cast(nn.Module, compress(model, keep_attention=0.5, inputs=words, step=1).module).double() for _ in range(3)
    )
    ids = words["input_ids"]
    distil(model, parts, batches(words), Healing(3, tokens=ids.numel(), blockwise=0))
    distil(model, whole, [{"input_ids": ids}], Healing(3, blockwise=0))
    far, near = (
        max(float((a - b).detach().abs().max()) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
        for other in (start, parts)
    )
    assert near < 1e-3 * far


def test_the_divergence_and_its_gradient_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "AT_A_TIME", 3)
    drawn = torch.Generator().manual_seed(0)
    goal, output = (torch.randn(2, 4, 7, dtype=torch.float64, generator=drawn) for _ in range(2))
    ours, torchs = (output.clone().requires_grad_() for _ in range(2))
    loss = healing.Divergence.apply(goal, ours)
    expected = nn.functional.kl_div(
        torchs.log_softmax(-1).flatten(0, 1), goal.log_softmax(-1).flatten(0, 1), reduction="batchmean", log_target=True
    )
    assert torch.allclose(loss, expected, rtol=1e-12)
    (2 * loss).backward()
    (2 * expected).backward()
    assert torch.allclose(ours.grad, torchs.grad, rtol=0, atol=1e-14)


def test_a_coded_cache_is_healed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "by_blocks", lambda *_: pytest.fail("block by block"))
    found: Any = compress("demo", keep_kv=0.15, windows=8, length=64, text="embedded", heal=4)
    assert found.before_healing is not None


def test_a_text_that_is_read_many_times_is_named() -> None:
    options: dict[str, Any] = {"keep_kv": 0.15, "windows": 8, "length": 64, "heal": 12}
    short: Any = compress("demo", **options)  # the mixture has nothing beyond its calibration windows
    assert any("more text heals better (--heal-text)" in note for note in short.notes)
    long: Any = compress("demo", **options, heal_text="embedded")
    assert not any("more text heals better" in note for note in long.notes)


def test_interrupted_healing_resumes_exactly(
    make: Callable, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    monkeypatch.setattr(healing, "SAVE_EVERY", 4)
    monkeypatch.setattr(healing, "SAVE_AFTER", -1.0)
    whole, parts = (compress(model, keep_attention=0.5, inputs=words, step=1).module for _ in range(2))
    distil(model, whole, batches(words), Healing(12))

    class Stop(Exception):
        pass

    def stop_at(what: str, done: int, of: int) -> None:
        if done == 6:
            raise Stop

    with pytest.raises(Stop):
        distil(model, parts, batches(words), Healing(12, folder=tmp_path / "state"), stop_at)
    assert (tmp_path / "state").exists()
    fresh = compress(model, keep_attention=0.5, inputs=words, step=1).module
    distil(model, fresh, batches(words), Healing(12, folder=tmp_path / "state"))
    assert not (tmp_path / "state").exists()
    for a, b in zip(whole.parameters(), fresh.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_two_processes_share_the_healing_and_one_writes(tmp_path: Path) -> None:
    options = [
        "--keep-attention",
        "0.25",
        "--windows",
        "8",
        "--length",
        "32",
        "--batch",
        "2",
        "--heal",
        "10",
        "--json",
        "-",
    ]
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*two, "-m", "deadweight", "compress", "demo", str(tmp_path / "out"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    json.loads(done.stdout)  # one of them spoke
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    small = deadweight.load(tmp_path / "out")
    assert torch.isfinite(small(torch.arange(32)[None]).logits).all()


def test_healing_reads_its_own_text_and_no_held_out_text(tmp_path: Path) -> None:
    source: Any = open_complete("demo")
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("".join(f"{i} sheep slept. " for i in range(400)))
    other.write_text("".join(f"No {i} goats. " for i in range(400)))
    found = head_calibration(source, "demo", CalibrationRequest(str(text), windows=8, length=32, batch=2))
    judged = {tuple(row) for b in found.judge for row in b["input_ids"].tolist()}
    for own in (None, str(other)):
        batches = text_to_heal_on(source, "demo", str(text), own, found, 10)
        rows = {tuple(row) for b in batches for row in b["input_ids"].tolist()}
        assert len(rows) >= 20 and not rows & judged
        assert (b"goats" in b"".join(map(bytes, rows))) == (own is not None)
