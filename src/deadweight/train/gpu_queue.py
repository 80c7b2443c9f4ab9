"""A queue of training jobs on one GPU. Every compiled graph has its own process, which compiles while others train.

One job trains at a time; its runs share the GPU. After each result the queue asks again which jobs are left, so a sweep
can decide what is trained next, and a queue that was stopped can be resumed.
"""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import torch

from deadweight.progress import Progress, silent
from deadweight.train.data import TokenSplit
from deadweight.train.repeated_runs import Repeated, TimedCurve, TrainingJob
from deadweight.train.settings import Table, Train
from deadweight.transformer import TransformerConfig

PREPARING = 4  # processes that compile at the same time
AHEAD = 6  # jobs for which processes are started before their turn
KEPT = 6  # processes at most: each holds weights and a copy of the text on the GPU
OVERHEAD = 3.0  # seconds that are left over at the end, at least


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker process needs before its first job."""

    model: Table  # fields of the config
    train: Train
    text: Path  # raw bytes: the training text, then the validation text
    cuts: tuple[int, int]  # ends of the training text and of the validation text
    graphs: bool = True  # steps are replayed as CUDA graphs
    side_by_side: int = 1  # runs of a job at most, for which the process compiles ahead

    def tokens(self, judged_on: int | None) -> TokenSplit:
        """One token per byte, mapped from the file; of the validation text the first `judged_on`."""
        text, (first, last) = np.memmap(self.text, dtype=np.uint8, mode="r"), self.cuts
        return TokenSplit(text[:first], text[first:last][:judged_on])


@dataclass(frozen=True)
class Agenda:
    """What a queue works on: `jobs` lists what is left, first things first, `setup` gives what the process of a graph
    needs, and `keep` takes the results of a job, one curve per member."""

    jobs: Callable[[], list[TrainingJob]]
    setup: Callable[[str], WorkerSetup]
    keep: Callable[[TrainingJob, list[TimedCurve]], None]


@dataclass
class Worker:
    """The queue's end of a process."""

    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    job: TrainingJob | None = None
    started: float = field(default_factory=time.perf_counter)


def serve(pipe: Connection, setup: WorkerSetup) -> None:
    """The process: compile, then train what is sent until None comes."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        repeated = Repeated(TransformerConfig(**setup.model), setup.train, device, graphs=setup.graphs)
        repeated.prepare(setup.side_by_side)
        pipe.send(None)
        while (job := pipe.recv()) is not None:
            pipe.send(repeated.run(job, setup.tokens(job.judged_on)))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception:  # noqa: BLE001 - sent to the queue, which continues without this graph
        pipe.send(traceback.format_exc())


def hire(setup: WorkerSetup) -> Worker:
    """A new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, setup), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


class Queue:
    """Works through an agenda until it is done or the time is over. `run_seconds` is the expected time of one step of
    one run, until it is measured."""

    def __init__(
        self, agenda: Agenda, *, seconds: float, run_seconds: float = 0.0, progress: Progress = silent
    ) -> None:
        self.agenda, self.progress = agenda, progress
        self.end = time.perf_counter() + seconds
        self.workers: dict[str, Worker] = {}
        self.failed: set[str] = set()
        self.run_seconds = run_seconds
        self.measured: list[float] = []  # seconds of one step of one run, by job

    def run(self) -> None:
        try:
            while True:
                jobs = self.open_jobs()
                self.hire_for(jobs)
                self.send(jobs)
                busy = any(w.job for w in self.workers.values())
                waiting = any(not w.ready for w in self.workers.values()) and time.perf_counter() < self.end
                if not busy and not (waiting and any(map(self.part_that_fits, jobs))):
                    return
                for pipe in wait([w.pipe for w in self.workers.values()], timeout=1.0):
                    self.hear(next(name for name, w in self.workers.items() if w.pipe is pipe))
        finally:
            for worker in self.workers.values():
                worker.process.terminate()

    def open_jobs(self) -> list[TrainingJob]:
        """The jobs that are left and not running."""
        running = [w.job for w in self.workers.values()]
        return [job for job in self.agenda.jobs() if job not in running and job.graph not in self.failed]

    def hire_for(self, jobs: list[TrainingJob]) -> None:
        """Start the processes of the next graphs; those whose graph is not needed soon make room."""
        wanted = list(dict.fromkeys(job.graph for job in jobs[:AHEAD]))
        for graph in wanted:
            if sum(not w.ready for w in self.workers.values()) >= PREPARING:
                return
            if graph not in self.workers and self.make_room(wanted):
                self.workers[graph] = hire(self.agenda.setup(graph))

    def make_room(self, wanted: list[str]) -> bool:
        """Whether there is room for one more process, after ending an idle one that is not wanted."""
        if len(self.workers) < KEPT:
            return True
        idle = [name for name, w in self.workers.items() if w.ready and w.job is None and name not in wanted]
        for name in idle[:1]:
            self.workers.pop(name).process.terminate()
        return bool(idle)

    def send(self, jobs: list[TrainingJob]) -> None:
        """Send the first job that can start now to its process, if none is running; towards the end, a part of it."""
        if any(w.job for w in self.workers.values()):
            return
        for job in jobs:
            worker, part = self.workers.get(job.graph), self.part_that_fits(job)
            if worker is not None and worker.ready and part is not None:
                worker.job, worker.started = part, time.perf_counter()
                worker.pipe.send(part)
                return

    def part_that_fits(self, job: TrainingJob) -> TrainingJob | None:
        """As many runs of a job as end in time, by the slowest job so far."""
        per_run = job.steps * max(self.measured, default=self.run_seconds)
        left = self.end - time.perf_counter() - OVERHEAD
        runs = len(job.members) if per_run == 0 and left > 0 else math.floor(left / per_run) if left > 0 else 0
        return replace(job, members=job.members[:runs]) if runs > 0 else None

    def hear(self, name: str) -> None:
        """Take a message of a process: None (ready), an error, or the results of its job."""
        worker = self.workers[name]
        try:
            message = worker.pipe.recv()
        except EOFError:
            message = "its process ended"
        gone = time.perf_counter() - worker.started
        if message is None:
            worker.ready = True
            self.progress(f"{name}: ready after {gone:.0f} s")
        elif isinstance(message, str):
            self.progress(f"{name}: given up\n{message}")
            self.failed.add(name)
            del self.workers[name]
        else:
            assert worker.job is not None
            job, worker.job = worker.job, None
            self.measured.append(gone / job.steps / len(job.members))
            self.agenda.keep(job, message)
            ends = ", ".join(f"{result.curve.valid_loss:.4f}" for result in message)
            speed = sum(result.tokens_per_second for result in message)
            self.progress(f"{name}, {job.steps} steps: {ends} after {gone:.1f} s, {speed:,.0f} tokens/s together")
