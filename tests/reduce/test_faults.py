"""Damaged checkpoints, full disks and killed processes: one clear line, and nothing half written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import deadweight
from deadweight.errors import DeadweightError

BIAS = "transformer.h.0.attn.c_attn.bias"


def with_tensor(folder: Path, change: Callable[[Tensor], Tensor], name: str = BIAS) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def nan(t: Tensor) -> Tensor:
    t = t.clone()
    t[3] = torch.nan
    return t


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, f"{BIAS} holds NaN"),
        (lambda t: t[:-1], f"{BIAS} has shape \\[23\\] in the checkpoint; expected \\[24\\]"),
        (lambda t: t.to(torch.int64), f"{BIAS} is stored as torch.int64"),
    ],
)
def test_a_bad_tensor_is_named_and_nothing_is_written(
    gpt2: Path, tmp_path: Path, change: Callable[[Tensor], Tensor], words: str
) -> None:
    with_tensor(gpt2, change)
    with pytest.raises(DeadweightError, match=words):
        deadweight.reduce(gpt2, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2"]


def test_a_model_that_returns_nan_is_refused_as_such(gpt2: Path, tmp_path: Path) -> None:
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": -100.0}))
    with pytest.raises(DeadweightError, match="returns NaN; expected numbers"):
        deadweight.reduce(gpt2, tmp_path / "out")


def test_shapes_are_compared_before_anything_is_proved(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config with 10 billion tokens took a minute, and then all memory."""
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(config | {"vocab_size": 10**10}))
    monkeypatch.setattr("deadweight.reduce.run.trace_source", pytest.fail)
    with pytest.raises(DeadweightError, match=r"wte.weight has shape \[11, 8\] in the checkpoint; expected \[10000"):
        deadweight.reduce(gpt2, gpt2.parent / "out")


def test_a_truncated_file_is_refused(gpt2: Path, tmp_path: Path) -> None:
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DeadweightError, match="truncated"):
        deadweight.reduce(gpt2, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2"]


def test_a_missing_weight_is_named(gpt2: Path, tmp_path: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, gpt2 / "model.safetensors", {"format": "pt"})
    with pytest.raises(DeadweightError, match="not in the checkpoint"):
        deadweight.reduce(gpt2, tmp_path / "out")


def test_out_is_refused_where_something_is(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DeadweightError, match="exists"):
        deadweight.reduce(gpt2, tmp_path / "out")
    for inside in (gpt2, gpt2 / "out"):
        with pytest.raises(DeadweightError, match=r"exists|inside it"):
            deadweight.reduce(gpt2, inside)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(gpt2: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(DeadweightError, match="cannot be written"):
        deadweight.reduce(gpt2, locked / "out")


FULL = """
import resource, sys, deadweight
from deadweight.errors import DeadweightError
from deadweight.reduce.stored_tensors import Stream
honest = Stream.tensors
def filling(*args):  # from here on the disk takes no more
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    yield from honest(*args)
Stream.tensors = filling
try:
    deadweight.reduce(sys.argv[1], sys.argv[2])
except DeadweightError as error:
    print(error)
    sys.exit(2)
"""


def test_a_disk_that_fills_up_leaves_nothing(gpt2: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(gpt2), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "could not be written" in done.stdout, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2"]


KILLS = int(os.environ.get("DEADWEIGHT_KILLS", "2"))  # each takes seconds; 20 by hand


@pytest.mark.slow
def test_a_killed_reduction_leaves_all_or_nothing(gpt2: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in gpt2.iterdir()}
    command = [sys.executable, "-m", "deadweight", "reduce", str(gpt2)]
    start = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    took = time.monotonic() - start
    moments = random.Random(0)
    for i in range(KILLS):
        out = tmp_path / f"out-{i}"
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.6, 1.05) * took)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert {p.name: p.read_bytes() for p in gpt2.iterdir()} == before
        if out.exists():
            assert deadweight.verify(gpt2, out).same


SMALL = """
import sys, deadweight
from pathlib import Path
from deadweight.errors import DeadweightError
from deadweight.reduce.stored_tensors import Stream
honest = Stream.tensors
def filling(*args):  # somebody else takes what is left, while we write
    with open(Path(sys.argv[2]).parent / "somebody", "wb", buffering=0) as other:
        try:
            while other.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    yield from honest(*args)
Stream.tensors = filling
try:
    deadweight.reduce(sys.argv[1], sys.argv[2])
except DeadweightError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 80 MB, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_real_disk_that_fills_up_leaves_nothing(gpt2: Path, small_disk: Path) -> None:
    command = [sys.executable, "-c", SMALL, str(gpt2), str(small_disk / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "No space left on device" in done.stdout, done.stderr
    assert sorted(p.name for p in small_disk.iterdir()) == ["somebody"]
    assert not done.stderr, "and nothing is said twice"


def test_a_disk_that_is_too_small_is_refused_before_the_work(gpt2: Path, small_disk: Path) -> None:
    (small_disk / "somebody").write_bytes(bytes(40 << 20))
    said: list[str] = []
    with pytest.raises(DeadweightError, match="GB free"):
        deadweight.reduce(gpt2, small_disk / "out", progress=lambda stage, *_: said.append(stage))
    assert "loading the weights" not in said
    (small_disk / "somebody").unlink()
    assert deadweight.reduce(gpt2, small_disk / "out").out is not None
