"""What several commands share: the names of layouts, and a bar that says what is being done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deadweight.report.terminal import make_console

Tell = Callable[[str, int, int], None]  # what is being done, how much of it is, and of how much (0: nobody knows)


class LayoutName(StrEnum):
    """How a checkpoint of ours is stored."""

    slim = "slim"
    stock = "stock"


@contextmanager
def stages_bar() -> Iterator[Tell]:
    """What is being done, and how long it will take, on standard error; nothing where nobody is looking."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("opening the model", total=None)
        now = ""

        def tell(what: str, done: int, of: int) -> None:
            nonlocal now
            if what != now:
                bar.reset(task, total=of or None, description=what)
                now = what
            bar.update(task, completed=done)

        yield tell
