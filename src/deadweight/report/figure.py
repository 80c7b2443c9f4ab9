"""Figures, by matplotlib where it is installed: the same file from the same numbers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from deadweight.errors import DeadweightError

Figure: TypeAlias = Any  # of matplotlib, which is imported when something is drawn
Axes: TypeAlias = Any


def pyplot() -> ModuleType:
    """matplotlib's pyplot, set to draw the same file from the same numbers."""
    try:
        import matplotlib
    except ImportError as error:
        raise DeadweightError(
            "a figure needs matplotlib, which is not installed: pip install deadweight[train]"
        ) from error
    matplotlib.use("svg")
    matplotlib.rc("svg", hashsalt="deadweight")  # otherwise ids inside the file are random
    from matplotlib import pyplot as drawing

    return drawing


def save(figure: Figure, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    pyplot().close(figure)
