"""One compression, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deadweight.compress.settings import Settings
from deadweight.progress import Progress
from deadweight.source.model import Source


@dataclass(frozen=True)
class Job:
    """What is compressed, how, and where the result goes."""

    source: Source
    model: Any  # as it was given: a folder, a name, a module
    target: Path | None
    settings: Settings
    precision: torch.dtype  # of the original's weights
    progress: Progress
