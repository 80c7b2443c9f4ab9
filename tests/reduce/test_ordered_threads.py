"""Several threads read, compute, check and write: the result is the same, and an error leaves nothing behind."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deadweight
from deadweight.errors import DeadweightError
from deadweight.progress import silent
from deadweight.reduce import layer_windows, run, stored_tensors, trial
from deadweight.reduce.apply import Applied, Weights, apply, independent, product
from deadweight.reduce.ordered_threads import in_order
from deadweight.reduce.plan import Request
from deadweight.save.safetensors_writer import Writer
from deadweight.save.uncached_file import UncachedFile
from deadweight.source.model import ModelSpec

from .test_layer_windows import deep as deep


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("deadweight")]


def counting(number: int, slow: bool = False) -> Iterator[str]:
    for i in range(3):
        if slow:
            time.sleep(0.01)
        yield f"{number}.{i}"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_come_in_the_order_of_the_jobs(threads: int) -> None:
    jobs = [partial(counting, i, slow=i % 2 == 0) for i in range(8)]
    result = list(in_order(jobs, threads, len, room=5))
    assert result == [f"{i}.{j}" for i in range(8) for j in range(3)] and not ours()


def test_waiting_results_hold_no_more_than_the_given_bytes() -> None:
    made: list[int] = []

    def job(number: int) -> Iterator[int]:
        made.append(number)
        yield number

    with closing(in_order([partial(job, i) for i in range(50)], 2, lambda _: 10, room=20)) as results:
        next(results)
        time.sleep(0.05)
        assert len(made) <= 6  # the one taken, two that wait, two in the threads' hands, one about to start


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_is_raised_once_in_its_turn_and_no_thread_is_left(threads: int) -> None:
    def failing() -> Iterator[str]:
        yield "before"
        raise ZeroDivisionError

    result: list[str] = []
    with pytest.raises(ZeroDivisionError), closing(in_order([partial(counting, 0), failing], threads, len, 9)) as all_:
        result.extend(all_)
        result += list(all_)
    assert result in ([], ["0.0", "0.1", "0.2", "before"]) and not ours()


def test_closing_the_iterator_stops_the_threads() -> None:
    with closing(in_order([partial(counting, i) for i in range(100)], 4, len, 9)) as results:
        assert next(results) == "0.0"
    assert not ours()


def full_after(count: int) -> Callable[[Any, memoryview], None]:
    """A disk that takes so many writes."""
    honest, taken = UncachedFile.write, 0

    def write(file: Any, data: memoryview) -> None:
        nonlocal taken
        taken += 1
        if taken > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(file, data)

    return write


def test_a_writer_that_fails_says_so_once_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UncachedFile, "write", full_after(2))

    def write() -> None:
        with Writer(tmp_path, room=4096) as writer:
            for i in range(100):
                writer.add(f"w{i}", torch.zeros(10))
            writer.close()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert not ours() and not (tmp_path / "model.safetensors").exists()


def test_a_writer_that_fails_at_the_last_tensor_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UncachedFile, "write", full_after(1))  # the room for the header is the first
    with Writer(tmp_path, room=4096) as writer:
        writer.add("w", torch.zeros(10))
        with pytest.raises(OSError, match="No space left"):
            writer.close()
    assert not ours() and not (tmp_path / "model.safetensors").exists()


def on_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (stored_tensors, trial):
        monkeypatch.setattr(module, "workers", lambda: count)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("taken", [0, 1, 20])
def test_a_full_disk_leaves_no_folder_and_no_thread(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, taken: int
) -> None:
    on_threads(monkeypatch, threads)
    monkeypatch.setattr(UncachedFile, "write", full_after(taken))
    with pytest.raises(DeadweightError, match=r"could not be written \(.*No space left.*nothing was left behind"):
        deadweight.reduce(deep, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"] and not ours()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("moment", ["writing and verifying", "first", "middle", "last"])
def test_an_interrupt_leaves_no_folder_and_no_thread(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, moment: str
) -> None:
    on_threads(monkeypatch, threads)

    def interrupt(said: str, done: int = 0, total: int = 0) -> None:
        done, total = map(int, re.findall(r"\d+", said)) if "rewrites" in said else (0, 1)
        reached = {"first": done > 0, "middle": done > total / 2, "last": done == total}
        if reached.get(moment, said == moment):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deadweight.reduce(deep, tmp_path / "out", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["deep"] and not ours()
    assert torch.get_default_dtype() == torch.float32


def test_an_error_in_a_window_is_raised(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: layer_windows.Window, name: str) -> Tensor:
        raise DeadweightError("the disk is gone")

    monkeypatch.setattr(layer_windows.Window, "original", failing)
    with pytest.raises(DeadweightError, match="the disk is gone"):
        deadweight.reduce(deep, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"] and not ours()


@pytest.mark.parametrize("in_memory", [True, False])
def test_files_and_verdicts_are_the_same_to_the_bit_on_one_two_and_four_threads(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    if in_memory:
        monkeypatch.setattr(run, "free_memory", lambda: 1 << 40)
    written, errors = [], []
    for count in (1, 2, 4):
        on_threads(monkeypatch, count)
        result = deadweight.reduce(deep, tmp_path / f"out{count}")
        assert result.verification is not None
        errors.append(result.verification.errors)
        out = tmp_path / f"out{count}"
        written.append(
            (result.steps, result.skipped, *((out / n).read_bytes() for n in ("model.safetensors", "config.json")))
        )
    assert written[0] == written[1] == written[2]
    assert errors[0] == errors[1] == errors[2]


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"])
def test_parts_give_what_the_plan_gives_in_one_go(folder_of: Callable[[str], Path], architecture: str) -> None:
    job = run.prepare(ModelSpec(folder_of(architecture)), Request("slim"), silent, weights=True)
    results = []
    plan = dict(enumerate(job.plan.rewrites))
    for groups in ([plan], independent(plan)):
        applied = Applied()
        finals = [item for group in groups for item in apply(group, Weights(job.read), applied)]
        results.append((dict(finals), applied))
    (whole, first), (parted, second) = results
    assert whole.keys() == parted.keys() and first.facts == second.facts and first.skipped == second.skipped
    for name, value in whole.items():
        assert value is parted[name] is None or torch.equal(value, parted[name]), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [torch.bfloat16, torch.float32, torch.float64])
def test_a_scaled_weight_is_rounded_as_from_float64(stored: torch.dtype, factor: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator).to(stored)
    scale = (1 + torch.randn(48, generator=generator)).to(factor).to(torch.float64)
    for target in {stored, torch.promote_types(stored, torch.float32)}:
        assert torch.equal(product(weight, scale, target), (weight.to(torch.float64) * scale).to(target))
