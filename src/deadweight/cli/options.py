"""Options that several commands share: the same name, meaning and help text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deadweight.laws.page import pages
from deadweight.source.written_shapes import check_written


def complete_law(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: names of laws that begin like this, after the last comma, each with its title."""
    before, comma, word = incomplete.rpartition(",")
    return [(f"{before}{comma}{p.law}", p.title) for p in pages() if p.law.startswith(word.lower())]


def joined(inputs: list[str] | None) -> str | None:
    """What several `--inputs` say, as one; raises now if they cannot be read."""
    written = ",".join(inputs) if inputs else None
    check_written(written)
    return written


ANY_MODEL = (
    "A Hugging Face folder or hub id, a config.json (no weights needed), a .gguf file, "
    "package.module:callable, or demo (a small model inside the package)."
)
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - means standard output.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the result as a self-contained HTML page.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a figure: .svg or .png (needs matplotlib).")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        metavar="SHAPE",
        help="Example inputs for a module without a config: 2x64:int, 2x3x32x32, mask=2x64:bool, or a .safetensors "
        "file with one tensor per argument. Default: guessed from the first layer.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow the Python code in the model's repository to run.")
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="DW…",
        help="Only these laws: codes or names, separated by commas.",
        autocompletion=complete_law,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="DW…",
        help="All laws except these: codes or names, separated by commas.",
        autocompletion=complete_law,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Text = Annotated[
    str, typer.Option("--text", help="A file, a folder, datasets:NAME, or embedded (Python's manual, in the package).")
]


class LayoutName(StrEnum):
    """How a checkpoint is stored."""

    slim = "slim"
    stock = "stock"
