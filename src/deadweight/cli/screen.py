"""Progress while a command runs, and where its result goes: the terminal, standard output, a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.report.json_report import as_text
from deadweight.report.terminal import make_console
from deadweight.report.text import one_line
from deadweight.source.kinds import JsonObject

if TYPE_CHECKING:
    from deadweight.report.html.render import Result


def complain(message: str) -> None:
    """Print an error on standard error, in one line."""
    line = Text.assemble(("error: ", "bold red"), one_line(message))
    make_console(stderr=True).print(line, soft_wrap=True)


def plain(text: str, *, stderr: bool = False) -> None:
    """Print text without colours and without wrapping it."""
    make_console(stderr=stderr).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """The current stage and the time left, on standard error; nothing where that is no terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with counting_bar(console) as bar:
        task = bar.add_task("opening the model", total=None)
        now = ""

        def progress(stage: str, done: int = 0, total: int = 0, /) -> None:
            nonlocal now
            if stage != now:
                bar.reset(task, total=total or None, description=one_line(stage))
                now = stage
            bar.update(task, completed=done)

        yield progress


def counting_bar(console: Console) -> Bar:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Bar(*columns, TimeRemainingColumn(), console=console, transient=True)


class JsonReport:
    """Where JSON goes: nowhere, to standard output in place of the report (-), or to a file as well as the report."""

    def __init__(self, target: str | None) -> None:
        self.target = target
        self.file = writable(target, "--json")

    def deliver(self, data: Callable[[], JsonObject], show: Callable[[Console], None]) -> None:
        """Print the report, or the JSON if it goes to standard output; write the file."""
        text = as_text(data()) if self.target is not None else ""
        if self.target == "-":
            sys.stdout.write(text)
        else:
            show(make_console())
        if self.file is not None:
            self.file.write_text(text, encoding="utf-8")


class HtmlReport:
    """Where the HTML page goes: nowhere, or to a file."""

    def __init__(self, target: Path | None) -> None:
        self.file = writable(target, "--html")

    def deliver(self, result: Result) -> None:
        if self.file is not None:
            from deadweight.report.html.render import render_html  # imports every stage

            self.file.write_text(render_html(result), encoding="utf-8")


def writable(file: str | Path | None, option: str) -> Path | None:
    """The path of a result; raises before any work is done if it cannot be written."""
    if file is None or str(file) == "-":
        return None
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        obstacle = "it is a folder" if path.is_dir() else f"the folder {str(path.absolute().parent)!r} does not exist"
        raise DeadweightError(
            f"cannot write {option} {str(path)!r}: {obstacle}; expected a file in an existing folder, or -"
        )
    return path


def drawable(file: Path | None) -> Path | None:
    if file is not None and file.suffix not in (".svg", ".png"):
        raise DeadweightError(f"found --plot {str(file)!r}; expected a name that ends in .svg or .png")
    return writable(file, "--plot")
