"""A queue of training runs on one GPU. Every compiled graph has its own process, which compiles while others train.

After each result the queue asks again which jobs are left, so a sweep can decide what is trained next, and a queue that
was stopped can be resumed.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import torch

from deadweight.progress import Progress, silent
from deadweight.train.data import TokenSplit
from deadweight.train.ensemble import Member
from deadweight.train.repeated_runs import Repeated, TimedCurve
from deadweight.train.settings import Table, Train
from deadweight.transformer import TransformerConfig

PREPARING = 4  # processes that compile at the same time
AHEAD = 16  # jobs for which processes are started before their turn
OVERHEAD = 6.0  # seconds of a run besides its steps: initial weights, evaluation
WORTH_IT = 1.03  # two runs share the GPU if together they are at least this many times as fast as one


@dataclass(frozen=True)
class TrainingJob:
    """One training run. `graph` names the process that runs it."""

    graph: str
    member: Member
    steps: int
    judged_on: int | None = None  # tokens of the validation text; None: all


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker process needs before its first job."""

    model: Table  # fields of the config
    train: Train
    text: Path  # raw bytes: the training text, then the validation text
    cuts: tuple[int, int]  # ends of the training text and of the validation text

    def tokens(self, judged_on: int | None) -> TokenSplit:
        """One token per byte, mapped from the file; of the validation text the first `judged_on`."""
        text, (first, last) = np.memmap(self.text, dtype=np.uint8, mode="r"), self.cuts
        return TokenSplit(text[:first], text[first:last][:judged_on])


@dataclass(frozen=True)
class Agenda:
    """What a queue works on: `jobs` lists what is left, first things first, `setup` gives what the process of a graph
    needs, and `keep` takes every result: the job, its curve, and whether another run shared the GPU."""

    jobs: Callable[[], list[TrainingJob]]
    setup: Callable[[str], WorkerSetup]
    keep: Callable[[TrainingJob, TimedCurve, bool], None]


@dataclass
class Worker:
    """The queue's end of a process."""

    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    job: TrainingJob | None = None
    beside: bool = False  # another run shared the GPU
    started: float = field(default_factory=time.perf_counter)


def serve(pipe: Connection, setup: WorkerSetup) -> None:
    """The process: compile, then train what is sent until None comes."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        repeated = Repeated(TransformerConfig(**setup.model), setup.train, device)
        repeated.prepare()
        pipe.send(None)
        while (job := pipe.recv()) is not None:
            pipe.send(repeated.run(job.member, job.steps, setup.tokens(job.judged_on)))
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
    """Works through an agenda until it is done or the time is over.

    `at_once` says how many runs share the GPU; by default two share it if a trial shows that this is faster.
    """

    def __init__(
        self, agenda: Agenda, *, seconds: float, at_once: int | None = None, progress: Progress = silent
    ) -> None:
        self.agenda, self.progress = agenda, progress
        self.end = time.perf_counter() + seconds
        self.workers: dict[str, Worker] = {}
        self.failed: set[str] = set()
        self.slots = at_once  # runs at a time; None: not known yet
        self.alone: dict[str, float] = {}  # tokens per second, by graph
        self.gains: list[float] = []  # speed of the runs that shared the GPU, relative to their speed alone
        self.step_seconds = {False: 0.0, True: 0.0}  # the slowest so far, alone (False) and sharing the GPU (True)

    def run(self) -> None:
        try:
            while True:
                jobs = self.open_jobs()
                self.hire_for(jobs)
                self.send(jobs)
                busy = any(w.job for w in self.workers.values())
                waiting = any(not w.ready for w in self.workers.values()) and time.perf_counter() < self.end
                if not busy and not (waiting and any(map(self.fits, jobs))):
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
        for job in jobs[:AHEAD]:
            if sum(not w.ready for w in self.workers.values()) >= PREPARING:
                return
            if job.graph not in self.workers:
                self.workers[job.graph] = hire(self.agenda.setup(job.graph))

    def send(self, jobs: list[TrainingJob]) -> None:
        """Send the first jobs that can start now to their processes, as many as there are free slots."""
        jobs = [job for job in jobs if self.is_free(job.graph) and self.fits(job)]
        places = self.slots or self.places_to_try(jobs)
        for job in jobs:
            running = [w for w in self.workers.values() if w.job]
            if len(running) < places and self.is_free(job.graph):
                worker = self.workers[job.graph]
                worker.job, worker.started, worker.beside = job, time.perf_counter(), bool(running)
                for other in running:
                    other.beside = True
                worker.pipe.send(job)

    def is_free(self, graph: str) -> bool:
        worker = self.workers.get(graph)
        return worker is not None and worker.ready and worker.job is None

    def places_to_try(self, jobs: list[TrainingJob]) -> int:
        """Two for the trial, once the speed of the next two graphs alone is known; else one."""
        idle = not any(w.job for w in self.workers.values())
        known = len({job.graph for job in jobs[:2]} & set(self.alone)) == 2
        return 2 if idle and known else 1

    def fits(self, job: TrainingJob) -> bool:
        """Whether it ends in time at the slowest speed so far."""
        beside = (self.slots or 1) > 1
        return time.perf_counter() + job.steps * self.step_seconds[beside] + OVERHEAD < self.end

    def hear(self, name: str) -> None:
        """Take a message of a process: None (ready), an error, or the result of its job."""
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
            self.learn(job, message, worker.beside)
            self.agenda.keep(job, message, worker.beside)
            self.progress(f"{name}, {job.member}, {job.steps} steps: {message.curve.valid_loss:.4f} after {gone:.1f} s")

    def learn(self, job: TrainingJob, result: TimedCurve, beside: bool) -> None:
        """Update the time per step; after the trial decide whether two runs share the GPU."""
        took = result.seconds[-1] / result.curve.steps[-1]
        self.step_seconds[beside] = max(self.step_seconds[beside], took)
        if not beside:
            self.alone[job.graph] = result.tokens_per_second
        elif self.slots is None:
            self.gains.append(result.tokens_per_second / self.alone[job.graph])
            if len(self.gains) == 2:
                self.slots = 2 if sum(self.gains) > WORTH_IT else 1
                self.progress(f"two runs at a time: {sum(self.gains):.3f} times the speed of one")
