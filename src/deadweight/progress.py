"""How long work says what it is doing: one way for every function that takes `progress`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done now; where it can be counted, with how much of it is done, and of how much."""

    def __call__(self, stage: str, done: int = 0, total: int = 0, /) -> None: ...


def silent(stage: str, done: int = 0, total: int = 0, /) -> None:
    """Nobody listens."""
