"""Figures, by matplotlib where it is installed: the same file from the same numbers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from deadweight.errors import DeadweightError

Figure: TypeAlias = Any  # of matplotlib, which is imported when something is drawn
Axes: TypeAlias = Any


def require_matplotlib() -> None:
    """Raise if no figure can be drawn; asked before the work whose result is to be drawn."""
    if find_spec("matplotlib") is None:
        raise DeadweightError('a figure needs matplotlib, which is not installed: pip install "deadweight[plot]"')


def pyplot() -> ModuleType:
    """matplotlib's pyplot, set to draw the same file from the same numbers."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rc("svg", hashsalt="deadweight")  # otherwise ids inside the file are random
    from matplotlib import pyplot as drawing

    return drawing


def save(figure: Figure, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    pyplot().close(figure)
