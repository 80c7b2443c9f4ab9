"""Figures: drawn by matplotlib where it is installed, the same file from the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deadweight.errors import DeadweightError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise DeadweightError(
            "a figure needs matplotlib, which is not installed: pip install deadweight[train]"
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "deadweight"  # otherwise names inside the file are drawn by chance
    from matplotlib import pyplot as found

    return found


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    pyplot().close(figure)
