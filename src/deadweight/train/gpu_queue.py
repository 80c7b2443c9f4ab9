"""A queue of training jobs on one GPU. Every compiled graph has its own process, which compiles while others train.

One job trains at a time; its runs share the GPU. After each result the queue asks again which jobs are left, so a sweep
can decide what is trained next, and a queue that was stopped can be resumed.
"""

from __future__ import annotations

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
PATIENCE = 5.0  # seconds that a process which is ready waits for that of an earlier job


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
    free_since: float = 0.0


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
    """Works through an agenda until it is done or the time is over. `expected` says how long one step of a job takes,
    and with how many runs, until it is measured. A graph whose process fails is tried once more, without CUDA graphs.
    """

    def __init__(
        self, agenda: Agenda, *, seconds: float, expected: tuple[float, int] = (0.0, 1), progress: Progress = silent
    ) -> None:
        self.agenda, self.progress = agenda, progress
        self.end = time.perf_counter() + seconds
        self.workers: dict[str, Worker] = {}
        self.plain: set[str] = set()  # graphs whose first process failed
        self.failed: set[str] = set()
        self.expected = expected
        self.measured: list[tuple[float, int]] = []  # seconds of one step of a job, and its runs

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
                setup = self.agenda.setup(graph)
                self.workers[graph] = hire(replace(setup, graphs=False) if graph in self.plain else setup)

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
        now, earlier = time.perf_counter(), False
        for job in jobs:
            worker, part = self.workers.get(job.graph), self.part_that_fits(job)
            if worker is None or part is None:
                continue
            if worker.ready and not (earlier and now < worker.free_since + PATIENCE):
                worker.job, worker.started = part, now
                worker.pipe.send(part)
                return
            earlier = earlier or not worker.ready

    def part_that_fits(self, job: TrainingJob) -> TrainingJob | None:
        """As many runs of a job as end in time."""
        left = self.end - time.perf_counter() - OVERHEAD
        runs = next((n for n in range(len(job.members), 0, -1) if job.steps * self.step_seconds(n) < left), 0)
        return replace(job, members=job.members[:runs]) if runs > 0 else None

    def step_seconds(self, runs: int) -> float:
        """How long a step of so many runs takes at most, by the slowest job so far. More runs take longer in
        proportion; fewer take less, but not in proportion, since one alone leaves a part of the GPU idle."""
        known = self.measured or [self.expected]
        return max(seconds * max(runs / n, (runs + 1) / (n + 1)) for seconds, n in known)

    def hear(self, name: str) -> None:
        """Take a message of a process: None (ready), an error, or the results of its job."""
        worker = self.workers[name]
        try:
            message = worker.pipe.recv()
        except EOFError:
            message = "its process ended"
        gone = time.perf_counter() - worker.started
        if message is None:
            worker.ready, worker.free_since = True, time.perf_counter()
            self.progress(f"{name}: ready after {gone:.0f} s")
        elif isinstance(message, str):
            self.give_up(name, message)
        else:
            assert worker.job is not None
            job, worker.job, worker.free_since = worker.job, None, time.perf_counter()
            self.measured.append((gone / job.steps, len(job.members)))
            self.agenda.keep(job, message)
            ends = ", ".join(f"{result.curve.valid_loss:.4f}" for result in message)
            speed = sum(result.tokens_per_second for result in message)
            self.progress(f"{name}, {job.steps} steps: {ends} after {gone:.1f} s, {speed:,.0f} tokens/s together")

    def give_up(self, name: str, why: str) -> None:
        """A process has failed: the next one of its graph does without CUDA graphs, and is the last."""
        again = name not in self.plain
        self.progress(f"{name}: {'tried again without CUDA graphs' if again else 'given up'}\n{why}")
        (self.plain if again else self.failed).add(name)
        self.workers.pop(name).process.terminate()
