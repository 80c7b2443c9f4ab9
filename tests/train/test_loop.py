"""The loop learns, resumes exactly, spreads over processes, and stops with a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import deadweight
from deadweight.cli.train import show
from deadweight.errors import DeadweightError
from deadweight.evaluate.run import evaluate
from deadweight.train import Listener, Run, train
from deadweight.train.loop import Trainer
from deadweight.train.settings import as_toml

Tiny = Callable[..., Run]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_it_learns_and_writes_what_every_command_reads(tmp_path: Path, tiny: Tiny) -> None:
    told: list = []
    result = train(
        tiny(train__steps=60, train__learning_rate=1e-2), tmp_path / "out", listener=Listener(tell=told.append)
    )
    assert result.bits_per_byte < 4 < 7.9 < told[0].loss / 0.6931
    assert result.tokens == 60 * 4 * 16 and told[-1].valid_loss == result.valid_loss
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generate(torch.tensor([[116, 104]]), max_new_tokens=5, do_sample=False).shape == (1, 7)
    assert deadweight.audit(str(tmp_path / "out")).findings
    told_again = evaluate(tmp_path / "out", tiny().data.text)[0]
    assert told_again.bits_per_byte < 4 and told_again.kv_bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_stopped_has_the_losses_of_one_that_was_not(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    run = tiny(train__accumulate=2, train__schedule="wsd", train__optimizer=optimizer)
    train(run, tmp_path / "whole")
    step = Trainer.one_step

    def stops(self: Trainer) -> torch.Tensor:
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "one_step", stops)
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts")
    monkeypatch.undo()
    said: list[str] = []
    train(run, tmp_path / "parts", listener=Listener(progress=said.append))
    assert "resuming at step 4" in said
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert losses(tmp_path / "whole") != losses_of_another_seed(tmp_path, tiny)


def test_a_finished_run_is_not_trained_again(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tiny(), tmp_path / "out")
    show(first)
    assert "is finished:" not in capsys.readouterr().out
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(Trainer, "__init__", lambda *_: pytest.fail("a finished run was opened"))
    again = train(tiny(), tmp_path / "out")
    show(again)
    assert "is finished: 6 steps done, 0 steps left" in " ".join(capsys.readouterr().out.split())
    assert again == replace(first, finished_before=True) and not first.finished_before
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    monkeypatch.undo()
    assert not train(tiny(), tmp_path / "out", overwrite=True).finished_before
    (tmp_path / "out" / "model.safetensors").unlink()
    assert not train(tiny(), tmp_path / "out").finished_before, "a run without its weights is not finished"


def test_a_batch_larger_than_memory_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(DeadweightError, match=r"batches of 160,000,000,000 tokens, whose training needs at least"):
        train(tiny(train__batch=10**10), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [10**7, 10**9])
def test_a_model_larger_than_memory_is_refused_before_a_folder_is_made(tmp_path: Path, tiny: Tiny, width: int) -> None:
    with pytest.raises(DeadweightError, match=r"found a (model of [\d,]+ parameters|weight of more than)") as error:
        train(tiny(model__d_model=width), tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_run_is_not_resumed_with_another_text(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    monkeypatch.setattr(Trainer, "save_model", lambda *_: None)
    train(run, tmp_path / "out")
    Path(run.data.text).write_text("something else altogether, again and again. " * 200)
    with pytest.raises(DeadweightError, match=r"another text than the one .* was trained on up to step"):
        train(run, tmp_path / "out")
    train(run, tmp_path / "out", overwrite=True)


def losses_of_another_seed(tmp_path: Path, tiny: Tiny) -> list[float]:
    train(tiny(train__seed=1, train__accumulate=2, train__schedule="wsd"), tmp_path / "other")
    return losses(tmp_path / "other")


def test_accumulation_sums_to_the_larger_batch(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of four, if they hold the sequences of one batch of eight, give its losses."""
    from deadweight.train import loop

    draw = loop.batch
    monkeypatch.setattr(loop, "batch", lambda t, n, seed, size, c: draw(t, n // 2, seed, 8, c).chunk(2)[n % 2])
    train(tiny(train__accumulate=2), tmp_path / "two")
    monkeypatch.setattr(loop, "batch", draw)
    train(tiny(train__batch=8), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def launched(folder: Path, run: Run, out: str, *before: str, **environment: str) -> subprocess.Popen[str]:
    file = folder / f"{out}.toml"
    file.write_text(as_toml(run), encoding="utf-8")
    command = [*before, "-m", "deadweight", "train", str(folder / out), "--config", str(file)]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, tiny: Tiny, sharded: bool) -> None:
    run = tiny(train__steps=4)
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    process = launched(tmp_path, run, "two", *two, **({"ACCELERATE_USE_FSDP": "true"} if sharded else {}))
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    train(run, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("one", "two"))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


def test_a_killed_process_leaves_a_state_to_resume_from(tmp_path: Path, tiny: Tiny) -> None:
    run = tiny(train__steps=400, train__save_every=1, train__log_every=1)
    process = launched(tmp_path, run, "killed", sys.executable)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "state").is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    said: list[str] = []
    short = tiny(train__steps=400, train__save_every=1, train__log_every=1)
    monkey = Stop(after=3)
    with pytest.raises(Stop):
        train(short, tmp_path / "killed", listener=Listener(tell=monkey.told, progress=said.append))
    assert any(line.startswith("resuming at step") for line in said)
    again = losses(tmp_path / "killed")
    whole = Stop(after=len(again))
    with pytest.raises(Stop):
        train(short, tmp_path / "whole", listener=Listener(tell=whole.told))
    assert again == losses(tmp_path / "whole")[: len(again)]


class Stop(Exception):
    """Raised after enough progress reports."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def told(self, _: object) -> None:
        self.left -= 1
        if not self.left:
            raise self


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deadweight.train import loop

    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda settings, step: 1e30 if step >= 5 else rate(settings, step))
    with pytest.raises(DeadweightError) as error:
        train(tiny(train__steps=20, train__log_every=7), tmp_path / "out")
    message = str(error.value)
    assert "at step" in message and ", first in transformer." in message and "lower learning rate" in message
    assert "the checkpoint of step 4 is kept" in message
    stored = load_file(tmp_path / "out" / "state" / "state.safetensors")
    assert all(bool(torch.isfinite(t).all()) for t in stored.values())
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_damaged_checkpoint_is_named(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(after=4)
    with pytest.raises(Stop):
        train(tiny(), tmp_path / "out", listener=Listener(tell=stop.told))
    file = tmp_path / "out" / "state" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DeadweightError, match=r"cannot be read .*remove it to start again"):
        train(tiny(), tmp_path / "out")


def test_another_run_in_the_folder_is_not_touched(tmp_path: Path, tiny: Tiny) -> None:
    train(tiny(train__steps=1), tmp_path / "out")
    with pytest.raises(DeadweightError, match=r"other settings \(train.steps: 1 there, 2 here\); expected the same"):
        train(tiny(train__steps=2), tmp_path / "out")
    train(tiny(train__steps=2), tmp_path / "out", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(DeadweightError):
            train(tiny(), tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"short"], ids=["empty", "binary", "short"])
def test_bad_text_leaves_nothing_behind_and_an_older_run_alone(tmp_path: Path, tiny: Tiny, content: bytes) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    bad = tiny(data__text=str(tmp_path / "bad.txt"))
    with pytest.raises(DeadweightError):
        train(bad, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    train(tiny(train__steps=1), tmp_path / "old")
    weights = (tmp_path / "old" / "model.safetensors").read_bytes()
    with pytest.raises(DeadweightError):
        train(bad, tmp_path / "old", overwrite=True)
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == weights
    train(tiny(train__steps=1), tmp_path / "old")


def test_a_file_in_the_way_is_named(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DeadweightError, match="is a file; expected a folder"):
        train(tiny(), tmp_path / "out")
