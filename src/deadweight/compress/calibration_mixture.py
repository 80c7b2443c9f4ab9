"""The default calibration text: which kinds of text it has, and the share of the windows that each gets."""

from __future__ import annotations

from importlib import resources

from deadweight import embedded

SHARES = {"prose": 0.3, "manual": 0.14, "dialogue": 0.14, "code": 0.18, "languages": 0.14, "structured": 0.1}


def mixture() -> dict[str, str]:
    """Text of several kinds, by the names of `SHARES`: all but the manual was written for this package."""
    folder = resources.files("deadweight.compress") / "calibration_text"
    return {
        name: embedded.prose() if name == "manual" else (folder / f"{name}.txt").read_text(encoding="utf-8")
        for name in SHARES
    }
