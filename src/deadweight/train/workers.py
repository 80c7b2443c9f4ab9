"""A queue of trainings on one GPU. Every compiled graph has a process of its own, which compiles while others train.

The order of work is a function of what is known: after each result the plan is asked again, so a sweep can decide what
is trained next, and a queue that is stopped goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deadweight.progress import Progress, silent
from deadweight.train.ensemble import Member
from deadweight.train.repeated import Outcome, Repeated
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig

PREPARING = 4  # processes that compile at the same time
AHEAD = 16  # jobs for which processes are started before their turn
OVERHEAD = 6.0  # seconds of a training that are not spent on its steps: first weights, the judgement
WORTH_IT = 1.03  # two trainings side by side are kept if together they are faster by this


@dataclass(frozen=True)
class Job:
    """One training. `graph` names the process that runs it."""

    graph: str
    member: Member
    steps: int
    judged_on: int | None = None  # tokens of the validation text; None: all of it


@dataclass(frozen=True)
class Graph:
    """What a process needs to know before its first job."""

    model: dict[str, Any]  # fields of the config
    train: Train
    text: Path  # raw bytes: the training text, then the validation text
    cuts: tuple[int, int]  # where the training text ends, and the validation text


@dataclass
class Worker:
    """The queue's end of a process."""

    process: Any
    pipe: Connection
    ready: bool = False
    job: Job | None = None
    beside: bool = False  # another job ran at the same time
    started: float = field(default_factory=time.perf_counter)


def serve(pipe: Connection, graph: Graph) -> None:
    """The process: compile, then train what is sent until nothing more comes."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        repeated = Repeated(TransformerConfig(**graph.model), graph.train, device)
        repeated.prepare()
        pipe.send(None)
        while (job := pipe.recv()) is not None:
            text = np.memmap(graph.text, dtype=np.uint8, mode="r")
            first, last = graph.cuts
            pipe.send(repeated.run(job.member, job.steps, text[:first], text[first:last][: job.judged_on]))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception:  # noqa: BLE001 - told to the queue, which goes on without this graph
        pipe.send(traceback.format_exc())


def hire(graph: Graph) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, graph), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


class Queue:
    """Works through a plan until it is done or the time is over; what it learns goes to `keep`.

    `plan` lists the jobs that are left, first things first; `keep` gets (job, outcome, whether another ran beside it).
    `at_once` says how many trainings share the GPU; by default two share it once that was tried and found faster.
    """

    def __init__(
        self,
        plan: Callable[[], list[Job]],
        graphs: Callable[[str], Graph],
        keep: Callable[[Job, Outcome, bool], None],
        *,
        seconds: float,
        at_once: int | None = None,
        say: Progress = silent,
    ) -> None:
        self.plan, self.graphs, self.keep, self.say = plan, graphs, keep, say
        self.end = time.perf_counter() + seconds
        self.workers: dict[str, Worker] = {}
        self.failed: set[str] = set()
        self.slots = at_once  # trainings at a time; None: not known before it was tried
        self.alone: dict[str, float] = {}  # tokens per second, by graph
        self.gains: list[float] = []  # of those that ran side by side, over what they did alone
        self.step_seconds = {False: 0.0, True: 0.0}  # the slowest so far, alone and beside others

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

    def open_jobs(self) -> list[Job]:
        """What is left and nobody works on."""
        running = [w.job for w in self.workers.values()]
        return [job for job in self.plan() if job not in running and job.graph not in self.failed]

    def hire_for(self, jobs: list[Job]) -> None:
        for job in jobs[:AHEAD]:
            if sum(not w.ready for w in self.workers.values()) >= PREPARING:
                return
            if job.graph not in self.workers:
                self.workers[job.graph] = hire(self.graphs(job.graph))

    def send(self, jobs: list[Job]) -> None:
        """Give the first jobs that can start now to their processes, as many as there are free places."""
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

    def places_to_try(self, jobs: list[Job]) -> int:
        """Two, once, when the next two jobs are of graphs whose speed alone is known; one before that."""
        idle = not any(w.job for w in self.workers.values())
        known = len({job.graph for job in jobs[:2]} & set(self.alone)) == 2
        return 2 if idle and known else 1

    def fits(self, job: Job) -> bool:
        """Whether it can end before the time is over, at the speed of the slowest so far."""
        beside = (self.slots or 1) > 1
        return time.perf_counter() + job.steps * self.step_seconds[beside] + OVERHEAD < self.end

    def hear(self, name: str) -> None:
        worker = self.workers[name]
        try:
            told = worker.pipe.recv()
        except EOFError:
            told = "its process ended"
        gone = time.perf_counter() - worker.started
        if told is None:
            worker.ready = True
            self.say(f"{name}: ready after {gone:.0f} s")
        elif isinstance(told, str):
            self.say(f"{name}: given up\n{told}")
            self.failed.add(name)
            del self.workers[name]
        else:
            assert worker.job is not None
            job, worker.job = worker.job, None
            self.learn(job, told, worker.beside)
            self.keep(job, told, worker.beside)
            self.say(f"{name}, {job.member}, {job.steps} steps: {told.curve.valid_loss:.4f} after {gone:.1f} s")

    def learn(self, job: Job, outcome: Outcome, beside: bool) -> None:
        """How long a step takes; and after two ran side by side, whether that is the faster way."""
        took = outcome.seconds[-1] / outcome.curve.steps[-1]
        self.step_seconds[beside] = max(self.step_seconds[beside], took)
        if not beside:
            self.alone[job.graph] = outcome.tokens_per_second
        elif self.slots is None:
            self.gains.append(outcome.tokens_per_second / self.alone[job.graph])
            if len(self.gains) == 2:
                self.slots = 2 if sum(self.gains) > WORTH_IT else 1
                self.say(f"two side by side: {sum(self.gains):.3f} times the speed of one")
