"""One compression: the model, the settings, and where the result goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deadweight.compress.settings import Settings
from deadweight.progress import Progress
from deadweight.source.hugging_face_config import local_folder
from deadweight.source.model import Source


@dataclass(frozen=True)
class CompressionJob:
    """What is compressed, how, and where the result goes."""

    source: Source
    model: Any  # as it was given: a folder, a name, a module
    target: Path | None
    settings: Settings
    precision: torch.dtype  # of the original's weights
    progress: Progress

    @property
    def folder(self) -> Path | None:
        """The folder that the model was read from."""
        return local_folder(str(self.model)) if isinstance(self.model, (str, Path)) else None
