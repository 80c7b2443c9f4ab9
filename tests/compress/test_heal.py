"""Healing brings the compressed model nearer to the original, and resumes where it was interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import deadweight
from deadweight.cli import compress as command
from deadweight.compress import heal as healing
from deadweight.compress.calibration import CalibrationRequest, head_calibration, text_to_heal_on
from deadweight.compress.heal import Healing, blocks_of, distil, healing_folder
from deadweight.compress.judge import judge
from deadweight.compress.run import compress
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


def test_the_command_heals_at_the_rate_of_the_library() -> None:
    assert signature(command.compress).parameters["heal_rate"].default == healing.RATE


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
