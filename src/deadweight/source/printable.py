"""Names and paths from other people's files, made safe to print in a terminal."""

from __future__ import annotations

import unicodedata

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, invisible formatting (bidi), surrogates, line breaks
LONGEST = 300


def printable(text: object) -> str:
    """The text on one line, with control and invisible characters replaced, cut after 300 characters."""
    shown = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in HIDDEN else c for c in str(text))
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def reason(error: BaseException) -> str:
    """Why something failed, as one printable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__)
