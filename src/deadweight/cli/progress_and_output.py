"""Progress while a command runs, and where its result goes: the terminal, standard output, a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from deadweight.cli.quiet import is_quiet
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.report.audit_json import as_text
from deadweight.report.audit_terminal import make_console
from deadweight.report.figure import require_matplotlib
from deadweight.report.text import one_line
from deadweight.source.type_aliases import JsonObject

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
    """The current stage and the time left, on standard error; nothing where that is no terminal, or with --quiet.

    What the user's own code prints meanwhile goes to standard error too: standard output is for the result.
    """
    console = make_console(stderr=True)
    if not console.is_terminal or is_quiet():
        with redirect_stdout(sys.stderr):
            yield silent
        return
    with counting_bar(console) as bar:
        task = bar.add_task("opening the model", total=None)
        now = ""

        def progress(stage: str, done: int = 0, total: int = 0, /) -> None:
            nonlocal now, task
            counts_on = done > 0 and total == bar.tasks[0].total  # one count over stages of several names
            if stage != now and not counts_on:
                bar.remove_task(task)  # a task that is reset keeps its total
                task = bar.add_task(one_line(stage), total=total or None)
            now = stage
            bar.update(task, completed=done, description=one_line(stage))

        yield progress


def counting_bar(console: Console) -> Bar:
    """A bar with what is done, of how much, and the time left; one that shows nothing with --quiet or in a pipe."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), CountAndTime())
    return Bar(*columns, console=console, transient=True, disable=is_quiet() or not console.is_terminal)


class CountAndTime(ProgressColumn):
    """What is done, of how much, and the time left; the time gone where nothing can be counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{timedelta(seconds=int(task.elapsed or 0))}")
        left = "-:--:--" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))
        return Text(f"{task.completed:.0f}/{task.total:.0f}, {left} left")


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
            tell_written(self.file)


class HtmlReport:
    """Where the HTML page goes: nowhere, or to a file."""

    def __init__(self, target: Path | None) -> None:
        if str(target) == "-":
            raise DeadweightError("found --html -; expected a file: only --json can go to standard output")
        self.file = writable(target, "--html")

    def deliver(self, result: Result) -> None:
        if self.file is not None:
            from deadweight.report.html.render import render_html  # imports every stage

            self.file.write_text(render_html(result), encoding="utf-8")
            tell_written(self.file)


def tell_written(file: Path) -> None:
    """Where the result lies, on standard error of a terminal; as quiet as the progress."""
    console = make_console(stderr=True)
    if console.is_terminal and not is_quiet():
        console.print(Text(f"written to {one_line(str(file))}", "dim"), soft_wrap=True)


def writable(file: str | Path | None, option: str) -> Path | None:
    """The path of a result; raises before any work is done if it cannot be written."""
    if file is None or str(file) == "-":
        return None
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        obstacle = "it is a folder" if path.is_dir() else f"the folder {str(path.absolute().parent)!r} does not exist"
        dash = ", or -" if option == "--json" else ""
        raise DeadweightError(
            f"cannot write {option} {str(path)!r}: {obstacle}; expected a file in an existing folder{dash}"
        )
    return path


def drawable(file: Path | None) -> Path | None:
    if file is not None and file.suffix not in (".svg", ".png"):
        raise DeadweightError(f"found --plot {str(file)!r}; expected a name that ends in .svg or .png")
    if file is not None:
        require_matplotlib()
    return writable(file, "--plot")
