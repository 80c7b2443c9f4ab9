"""Models that are not reduced: the errors for them."""

from __future__ import annotations

from pathlib import Path

from deadweight.errors import DeadweightError
from deadweight.slim.load import is_slim
from deadweight.source.hugging_face_config import ADAPTER, MERGE
from deadweight.source.model import Source
from deadweight.source.printable import printable


def refuse_unfit(source: Source) -> None:
    """Raise if the model is slim, quantised, an adapter, or without parameters."""
    if is_slim(source.config):
        raise DeadweightError(f"{printable(source.name)} is slim already: deadweight has reduced it; use it as it is")
    if source.quantised and not source.name.endswith(".gguf"):
        raise DeadweightError(
            f"{printable(source.name)} is quantised; expected plain weights: reduce before quantising"
        )
    folder = Path(source.name).expanduser()
    if source.config is not None and (folder / ADAPTER).is_file():
        raise DeadweightError(f"{printable(source.name)} holds an adapter ({ADAPTER}) besides its weights; {MERGE}")
    if not source.shapes:
        raise DeadweightError(
            f"{printable(source.name)} has no parameters; expected a module with parameters to reduce"
        )
