"""Options that several commands have: the same name, the same meaning, the same words."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder or hub id, a config.json (no weights needed), a .gguf file, "
        "package.module:callable, or the word demo.",
    ),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .svg or .png (needs matplotlib).")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's repository run its own Python code.")
]
Select = Annotated[
    list[str] | None, typer.Option("--select", metavar="DW…", help="Only these laws: codes or names, by comma.")
]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="DW…", help="All but these laws: codes or names, by comma.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Text = Annotated[str, typer.Option("--text", help="A file, a folder, datasets:NAME, or embedded.")]


class LayoutName(StrEnum):
    """How a checkpoint of ours is stored."""

    slim = "slim"
    stock = "stock"
