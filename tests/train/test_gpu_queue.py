"""The queue: which process runs which job, with simulated processes, and once with real ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deadweight.train import gpu_queue
from deadweight.train.ensemble import Curve, Member
from deadweight.train.gpu_queue import Agenda, Queue, TrainingJob, WorkerSetup
from deadweight.train.repeated_runs import TimedCurve
from deadweight.train.settings import Train

ALONE = 0.04  # seconds of a played job


class Played:
    """Both ends of a process whose jobs take no processor time; each is slower if another runs beside it."""

    running: ClassVar[list[Played]] = []

    def __init__(self, together: float) -> None:
        self.together, self.job, self.beside = together, None, False  # type: ignore[var-annotated]
        self.answers = [time.perf_counter()]  # when they come

    def send(self, job: TrainingJob) -> None:
        Played.running.append(self)
        self.job, self.beside = job, False
        for played in Played.running if len(Played.running) > 1 else ():
            played.beside = True
        self.answers.append(time.perf_counter() + ALONE)

    def recv(self) -> Any:
        self.answers.pop(0)
        if self.job is None:
            return None
        Played.running.remove(self)
        takes = self.together if self.beside else ALONE
        curve = Curve(self.job.member, (self.job.steps,), (1.0,), 1.0, None)
        return "no memory" if self.job.member.seed < 0 else TimedCurve(curve, (takes,), self.job.steps / takes, None)

    def terminate(self) -> None: ...


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    Played.running.clear()

    def ready(pipes: list[Played], timeout: float) -> list[Played]:
        while True:
            found = [p for p in pipes if p.answers and p.answers[0] <= time.perf_counter()]
            if found or not any(p.answers for p in pipes):
                return found
            time.sleep(0.002)

    def make(jobs: list[TrainingJob], *, seconds: float = 60.0, together: float = 2 * ALONE) -> tuple[Queue, list[Any]]:
        done: list[Any] = []
        monkeypatch.setattr(gpu_queue, "OVERHEAD", 0.0)
        monkeypatch.setattr(gpu_queue, "wait", ready)

        def hire(graph: Any) -> gpu_queue.Worker:
            played: Any = Played(together)
            return gpu_queue.Worker(played, played)

        monkeypatch.setattr(gpu_queue, "hire", hire)
        known: Any = lambda name: name  # noqa: E731
        left = lambda: [j for j in jobs if j not in [d[0] for d in done]]  # noqa: E731
        made = Queue(Agenda(left, known, lambda job, _, beside: done.append((job, beside))), seconds=seconds)
        return made, done

    return make


def jobs(*names: str, steps: int = 10) -> list[TrainingJob]:
    return [TrainingJob(name, Member(place, 1e-3, 0.1), steps) for place, name in enumerate(names)]


def test_all_jobs_are_done_once_and_two_at_a_time_only_where_that_was_faster(queue: Any) -> None:
    wanted = jobs("a", "b", "a", "b", "a", "b", "a", "b")
    made, done = queue(wanted, together=2 * ALONE)
    made.run()
    assert sorted(j.member.seed for j, _ in done) == list(range(8))
    assert made.slots == 1 and [beside for _, beside in done[4:]] == [False] * 4
    assert sum(beside for _, beside in done) == 2
    made, done = queue(wanted, together=1.2 * ALONE)
    made.run()
    assert made.slots == 2 and sum(beside for _, beside in done) > 2


def test_jobs_that_would_end_too_late_are_not_begun_but_shorter_ones_are(queue: Any) -> None:
    long, short = jobs("a", "a", steps=100), [TrainingJob("a", Member(7, 1e-3, 0.1), 1)]
    made, done = queue([jobs("a")[0], *long, *short], seconds=0.3)
    made.run()  # ten steps take 0.04 s, so a hundred take longer than what is left
    assert [j.steps for j, _ in done] == [10, 1]


def test_a_graph_that_fails_is_given_up_and_the_others_go_on(queue: Any) -> None:
    made, done = queue([TrainingJob("a", Member(-1, 1e-3, 0.1), 10), *jobs("a", "b", "b")])
    made.run()
    assert made.failed == {"a"} and [j.graph for j, _ in done] == ["b", "b"]


@pytest.mark.slow
def test_processes_train_and_answer(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the cat sat on the mat. " * 100)
    model = {"d_model": 16, "n_layers": 1, "heads": 2, "context": 16, "vocab_size": 256}
    done: list[tuple[TrainingJob, TimedCurve]] = []
    plan = [TrainingJob("a", Member(s, 1e-2, 0.1), 30) for s in (0, 1)]
    agenda = Agenda(
        lambda: [j for j in plan if j not in [d for d, _ in done]],
        lambda _: WorkerSetup(model, Train(batch=2, compile=False), text, (2000, 2400)),
        lambda job, curve, _: done.append((job, curve)),
    )
    Queue(agenda, seconds=120).run()
    assert [job for job, _ in done] == plan
    assert all(o.curve.train_loss[-1] < o.curve.train_loss[0] for _, o in done)
