"""The queue: which process runs which job, with simulated processes, and once with real ones."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deadweight.train import gpu_queue
from deadweight.train.ensemble import Curve, Member
from deadweight.train.gpu_queue import Agenda, Queue, WorkerSetup
from deadweight.train.repeated_runs import TimedCurve, TrainingJob
from deadweight.train.settings import Train

TAKES = 0.04  # seconds of ten steps of a played run


class Played:
    """Both ends of a process whose jobs take no processor time."""

    made: ClassVar[list[Played]] = []

    def __init__(self, setup: WorkerSetup) -> None:
        Played.made.append(self)
        self.setup, self.job, self.ended = setup, None, False  # type: ignore[var-annotated]
        self.answers = [time.perf_counter()]  # when they come

    def send(self, job: TrainingJob) -> None:
        assert not any(p.job for p in Played.made), "two jobs at a time"
        self.job = job
        self.answers.append(time.perf_counter() + TAKES * job.steps / 10 * len(job.members))

    def recv(self) -> Any:
        self.answers.pop(0)
        if self.job is None:
            return None
        job, self.job = self.job, None
        if job.members[0].seed < 0:
            return "no memory"
        return [TimedCurve(Curve(m, (job.steps,), (1.0,), 1.0, None), (TAKES,), 1.0, None) for m in job.members]

    def terminate(self) -> None:
        self.ended = True


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    Played.made.clear()

    def ready(pipes: list[Played], timeout: float) -> list[Played]:
        while True:
            found = [p for p in pipes if p.answers and p.answers[0] <= time.perf_counter()]
            if found or not any(p.answers for p in pipes):
                return found
            time.sleep(0.002)

    def make(jobs: list[TrainingJob], *, seconds: float = 60.0) -> tuple[Queue, list[TrainingJob]]:
        done: list[TrainingJob] = []
        monkeypatch.setattr(gpu_queue, "OVERHEAD", 0.0)
        monkeypatch.setattr(gpu_queue, "wait", ready)

        def hire(setup: WorkerSetup) -> gpu_queue.Worker:
            played: Any = Played(setup)
            return gpu_queue.Worker(played, played)

        monkeypatch.setattr(gpu_queue, "hire", hire)
        known = lambda name: WorkerSetup({"graph": name}, Train(), Path(), (0, 0))  # noqa: E731
        left = lambda: [j for j in jobs if j not in done]  # noqa: E731
        return Queue(Agenda(left, known, lambda job, _: done.append(job)), seconds=seconds), done

    return make


def jobs(*names: str, steps: int = 10, members: int = 1) -> list[TrainingJob]:
    seeds = lambda place: tuple(Member(10 * place + i, 1e-3, 0.1) for i in range(members))  # noqa: E731
    return [TrainingJob(name, seeds(place), steps) for place, name in enumerate(names)]


def test_all_jobs_are_done_once_and_one_at_a_time(queue: Any) -> None:
    wanted = jobs("a", "b", "a", "b", members=2)
    made, done = queue(wanted)
    made.run()
    assert sorted(done, key=wanted.index) == wanted
    assert len(Played.made) == 2 and all(p.ended for p in Played.made)


def test_a_process_that_is_not_needed_any_more_makes_room(queue: Any) -> None:
    names = [f"shape {i}" for i in range(gpu_queue.KEPT + 3)]
    made, done = queue(jobs(*names, steps=1))
    made.run()
    assert [job.graph for job in done] == names
    assert len(made.workers) <= gpu_queue.KEPT < len(Played.made)


def test_jobs_that_would_end_too_late_are_not_begun_but_shorter_ones_are(queue: Any) -> None:
    long, short = jobs("a", "a", steps=100), [TrainingJob("a", (Member(7, 1e-3, 0.1),), 1)]
    made, done = queue([jobs("a")[0], *long, *short], seconds=0.3)
    made.run()  # ten steps take 0.04 s, so a hundred take longer than what is left
    assert [j.steps for j in done] == [10, 1]


def test_of_a_job_that_would_end_too_late_those_runs_are_trained_that_end_in_time(queue: Any) -> None:
    first, many = jobs("a")[0], jobs("a", steps=10, members=20)[0]
    made, done = queue([first, many], seconds=0.3)
    made.agenda = replace(made.agenda, jobs=lambda: [many] if len(done) == 1 else [first] if not done else [])
    made.run()
    assert done[0] == first and 1 <= len(done[1].members) < 20
    assert done[1].members == many.members[: len(done[1].members)]


def test_the_expected_time_of_a_step_counts_before_any_is_measured(queue: Any) -> None:
    made, done = queue(jobs("a", steps=10), seconds=5.0)
    made.expected = 1.0, 1
    made.run()
    assert done == []


def test_fewer_runs_than_were_measured_do_not_take_less_in_proportion(queue: Any) -> None:
    made, _ = queue([])
    made.measured = [(3.0, 3)]  # seconds of a step of three runs that fill the GPU
    assert [made.step_seconds(n) for n in (1, 2, 3, 6)] == [1.5, 2.25, 3.0, 6.0]
    made.measured.append((8.0, 3))
    assert made.step_seconds(3) == 8.0


def test_a_process_that_fails_is_replaced_by_one_without_cuda_graphs_then_given_up(queue: Any) -> None:
    made, done = queue([TrainingJob("a", (Member(-1, 1e-3, 0.1),), 10), *jobs("a", "b", "b")])
    made.run()
    assert made.failed == {"a"} and [j.graph for j in done] == ["b", "b"]
    processes = [(p.setup.model["graph"], p.setup.graphs) for p in Played.made]
    assert sorted(processes) == [("a", False), ("a", True), ("b", True)]


def test_a_later_job_waits_a_moment_for_the_process_of_an_earlier_one(queue: Any) -> None:
    made, _ = queue([])
    early, late = jobs("a", "b")
    setup = WorkerSetup({}, Train(), Path(), (0, 0))
    ends = [Played(setup), Played(setup)]
    a, b = (gpu_queue.Worker(p, p) for p in ends)  # type: ignore[arg-type]
    made.workers = {"a": a, "b": b}
    b.ready, b.free_since = True, time.perf_counter()
    made.send([early, late])
    assert b.job is None
    b.free_since -= gpu_queue.PATIENCE
    made.send([early, late])
    assert b.job == late
    a.ready, b.job, ends[1].job = True, None, None
    b.free_since = time.perf_counter()
    made.send([late])
    assert b.job == late  # nothing that is wanted earlier is being prepared


@pytest.mark.slow
def test_processes_train_and_answer(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the cat sat on the mat. " * 100)
    model = {"d_model": 16, "n_layers": 1, "heads": 2, "context": 16, "vocab_size": 256}
    done: list[tuple[TrainingJob, list[TimedCurve]]] = []
    plan = [TrainingJob("a", (Member(s, 1e-2, 0.1), Member(s, 2e-2, 0.1)), 30) for s in (0, 1)]
    agenda = Agenda(
        lambda: [j for j in plan if j not in [d for d, _ in done]],
        lambda _: WorkerSetup(model, Train(batch=2, compile=False), text, (2000, 2400)),
        lambda job, curves: done.append((job, curves)),
    )
    Queue(agenda, seconds=120).run()
    assert [job for job, _ in done] == plan
    assert all(o.curve.train_loss[-1] < o.curve.train_loss[0] for _, curves in done for o in curves)
