"""What the records of studies have in common: the circumstances of a run, and the page and figure made of a record."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from deadweight.version import __version__

Record = dict[str, Any]


def circumstances() -> dict[str, str]:
    """Versions and machine."""
    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deadweight": __version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
    }


def show(
    file: Path, page: Callable[[Record], str], figure: Callable[[Record, Path], None], markdown: Path | None
) -> None:
    """Print the page of a record; write it, and the figure beside it, where asked."""
    record = json.loads(file.read_text(encoding="utf-8"))
    told = page(record)
    Console().print(told, markup=False)
    if markdown is not None:
        figure(record, markdown.with_suffix(".svg"))
        markdown.write_text(told, encoding="utf-8")
