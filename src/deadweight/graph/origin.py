"""Where an operation comes from: the module that ran it, and the line of code that asked for it."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Origin:
    """The path of a module (empty: the model itself; None: not known) and a line of its code; line 0: not known."""

    module: str | None
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        names = [] if self.module is None else [self.module or "the model"]
        return ", ".join([*names, f"{Path(self.file).name}:{self.line}"] if self.line else names)


def origin_of(meta: Mapping[str, Any]) -> Origin | None:
    """The origin of an operation, from what the tracer noted about it; None where it noted nothing."""
    modules = list((meta.get("nn_module_stack") or {}).values())
    file, line = innermost_line(meta.get("stack_trace") or "")
    if not modules and not line:
        return None
    return Origin(str(modules[-1][0]) if modules else None, file, line)


def innermost_line(trace: str) -> tuple[str, int]:
    """The innermost line of the user's own code; of a model that is all library, of that library, but not of torch."""
    frames = [(file, int(line)) for file, line in reversed(FRAME.findall(trace)) if is_readable(file)]
    return next((frame for frame in frames if not is_library(frame[0])), frames[0] if frames else ("", 0))


@cache
def is_readable(file: str) -> bool:
    """Whether a file holds a model's code: not torch's, not ours, not made up by an interpreter."""
    ours = file.startswith(OURS) and not file.startswith((f"{OURS}/transformer", f"{OURS}/slim"))
    return not file.startswith((TORCH, "<")) and not ours


@cache
def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file.startswith((*(f"{root}/" for root in roots), OURS))
