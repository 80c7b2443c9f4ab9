"""Independent producers on several threads: results come in the order of the producers, and only a few wait.

Why not a library: a job of `concurrent.futures` gives one result, and nothing there limits the bytes of results that
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Condition, Thread
from typing import Generic, TypeVar

from deadweight.threads import limit

T = TypeVar("T")
Producer = Callable[[], Iterator[T]]


class Stopped(Exception):
    """Raised inside a producer when its results are no longer wanted."""


def in_order(producers: Sequence[Producer[T]], threads: int, size: Callable[[T], int], room: int) -> Generator[T]:
    """The results of all producers, those of the first one first, whatever the number of threads.

    Results that wait hold at most `room` bytes, plus one result. An exception of a producer is raised here when its
    turn comes. Close the iterator: then no thread is left running.
    """
    if threads == 1:
        for produce in producers:
            yield from produce()
        return
    crew = Crew(producers, size, room)
    crew.start(min(threads, len(producers)))
    try:
        for number in range(len(producers)):
            yield from crew.results_of(number)
    finally:
        crew.stop()


class Crew(Generic[T]):
    """Threads that run producers in their order; one thread always runs the first unfinished producer."""

    def __init__(self, producers: Sequence[Producer[T]], size: Callable[[T], int], room: int) -> None:
        self.producers, self.size, self.room = producers, size, room
        self.waiting: list[deque[T]] = [deque() for _ in producers]
        self.failures: dict[int, BaseException] = {}
        self.done: set[int] = set()
        self.taken = self.first = self.used = 0  # producers started; the one whose turn it is; bytes that wait
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
        limit(1)  # the matrices are small: producers in parallel are faster than threads inside one
        while (number := self.next_producer()) is not None:
            try:
                for result in self.producers[number]():
                    self.put(number, result)
            except BaseException as error:  # noqa: BLE001 - raised where the results are taken
                self.failures[number] = error
            with self.changed:
                self.done.add(number)
                self.changed.notify_all()

    def next_producer(self) -> int | None:
        """The next producer, once the waiting results leave room for its own."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.used < self.room or self.taken == self.first)
            if self.stopped or self.taken == len(self.producers):
                return None
            self.taken += 1
            return self.taken - 1

    def put(self, number: int, result: T) -> None:
        size = self.size(result)
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.used + size <= self.room or self.is_next(number))
            if self.stopped:
                raise Stopped
            self.waiting[number].append(result)
            self.used += size
            self.changed.notify_all()

    def is_next(self, number: int) -> bool:
        """Whether the consumer waits for this producer's next result: it must come even if there is no room."""
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
