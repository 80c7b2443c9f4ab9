"""Independent jobs on several threads: their results come in the order of the jobs, and few wait at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Condition, Thread
from typing import Generic, TypeVar

from deadweight.threads import limit

T = TypeVar("T")
Job = Callable[[], Iterator[T]]


class Stopped(Exception):
    """Raised inside a job when its results are no longer wanted."""


def in_order(jobs: Sequence[Job[T]], threads: int, size: Callable[[T], int], room: int) -> Generator[T]:
    """The results of all jobs, those of the first job first, whatever the number of threads.

    Results that nobody has taken yet hold at most `room` bytes, and one result more. What a job raises is raised here
    when its turn comes. Close the iterator: then no thread is left running.
    """
    if threads == 1:
        for job in jobs:
            yield from job()
        return
    crew = Crew(jobs, size, room)
    crew.start(min(threads, len(jobs)))
    try:
        for number in range(len(jobs)):
            yield from crew.results_of(number)
    finally:
        crew.stop()


class Crew(Generic[T]):
    """Threads that take jobs in their order; the first unfinished job is always in somebody's hands."""

    def __init__(self, jobs: Sequence[Job[T]], size: Callable[[T], int], room: int) -> None:
        self.jobs, self.size, self.room = jobs, size, room
        self.waiting: list[deque[T]] = [deque() for _ in jobs]
        self.failures: dict[int, BaseException] = {}
        self.done: set[int] = set()
        self.taken = self.first = self.used = 0  # jobs started; the job whose results are asked for; bytes that wait
        self.stopped = False
        self.changed = Condition()
        self.threads: list[Thread] = []

    def start(self, count: int) -> None:
        self.threads = [Thread(target=self.work, name=f"deadweight-worker-{i}", daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()

    def work(self) -> None:
        limit(1)  # the matrices of one job are small: jobs side by side are faster than threads inside one
        while (number := self.next_job()) is not None:
            try:
                for result in self.jobs[number]():
                    self.put(number, result)
            except BaseException as error:  # noqa: BLE001 - raised where the results are taken
                self.failures[number] = error
            with self.changed:
                self.done.add(number)
                self.changed.notify_all()

    def next_job(self) -> int | None:
        """The next job, once the results of earlier ones leave room for it."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.used < self.room or self.taken == self.first)
            if self.stopped or self.taken == len(self.jobs):
                return None
            self.taken += 1
            return self.taken - 1

    def put(self, number: int, result: T) -> None:
        size = self.size(result)
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.used + size <= self.room or self.is_asked_for(number))
            if self.stopped:
                raise Stopped
            self.waiting[number].append(result)
            self.used += size
            self.changed.notify_all()

    def is_asked_for(self, number: int) -> bool:
        """Whether somebody waits for this job's next result: it must come, full or not."""
        return number == self.first and not self.waiting[number]

    def results_of(self, number: int) -> Iterator[T]:
        with self.changed:
            self.first = number
            self.changed.notify_all()
        while (result := self.take(number)) is not None:
            yield result[0]
        if number in self.failures:
            raise self.failures[number]

    def take(self, number: int) -> tuple[T] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting[number] or number in self.done)
            if not self.waiting[number]:
                return None
            result = self.waiting[number].popleft()
            self.used -= self.size(result)
            self.changed.notify_all()
            return (result,)
