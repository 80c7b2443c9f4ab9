"""How functions report progress: the type of every parameter `progress`. The bar itself is in `cli`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the name of the current stage and, where it can be counted, how much of it is done, of how much."""

    def __call__(self, stage: str, done: int = 0, total: int = 0, /) -> None: ...


def silent(stage: str, done: int = 0, total: int = 0, /) -> None:
    """Report nothing."""
