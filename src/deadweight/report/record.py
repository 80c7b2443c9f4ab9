"""Records of studies and benchmarks: the measurements as JSON, and the page and figure that are made of them.

A page can be made again from its record at any time, without measuring. Studies and benchmarks share the options by
which they are asked to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deadweight.report.circumstances import circumstances as circumstances
from deadweight.source.type_aliases import JsonObject

RecordArgument = Annotated[Path, typer.Argument(metavar="RECORD", help="The record (JSON).")]
OutOption = Annotated[Path, typer.Option("--out", metavar="RECORD", help="The record to write.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="RECORD", help="Write the record here.")]
ReadOption = Annotated[
    Path | None, typer.Option("--read", metavar="RECORD", help="Measure nothing: make the page of this record.")
]
PageOption = Annotated[
    Path | None, typer.Option("--markdown", metavar="PAGE", help="Write the page here, and a figure beside it.")
]


def load_record(file: Path) -> JsonObject:
    """The record; empty if there is no file yet."""
    record: JsonObject = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return record


def save_record(file: Path, record: JsonObject, indent: int | None = 1) -> None:
    """Write the record; on one line if `indent` is None."""
    file.parent.mkdir(parents=True, exist_ok=True)
    separators = (",", ":") if indent is None else None
    file.write_text(json.dumps(record, indent=indent, separators=separators) + "\n", encoding="utf-8")


def read_rows(file: Path) -> tuple[JsonObject, list[JsonObject]]:
    """A record of rows: the setting, and one row per measurement."""
    record = load_record(file)
    return record.get("setting", {}), record.get("rows", [])


def write_rows(file: Path | None, setting: JsonObject, rows: Iterable[object], **more: object) -> None:
    """Write a record of rows, which are dataclasses or dicts, unless `file` is None."""
    if file is not None:
        plain = [asdict(r) if is_dataclass(r) and not isinstance(r, type) else r for r in rows]
        save_record(file, {"setting": setting, "rows": plain, **more})


def show_page(text: str, page: Path | None) -> None:
    """Print a page; write it to a file if one is given."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if page is not None:
        page.write_text(text, encoding="utf-8")


def show_record(
    file: Path, page: Callable[[JsonObject], str], figure: Callable[[JsonObject, Path], None], markdown: Path | None
) -> None:
    """Print the page of a record; with `markdown`, write it there and the figure beside it."""
    record = load_record(file)
    show_page(page(record), markdown)
    if markdown is not None:
        figure(record, markdown.with_suffix(".svg"))


def add_report(app: typer.Typer, page: Callable[[JsonObject], str], figure: Callable[[JsonObject, Path], None]) -> None:
    """Give a study the command `report`."""

    @app.command()
    def report(file: RecordArgument, markdown: PageOption = None) -> None:
        """Make the page and the figure of a record."""
        show_record(file, page, figure, markdown)
