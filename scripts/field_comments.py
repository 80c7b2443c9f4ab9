"""Fields of dataclasses are documented by the comment behind them: the reference shows it as their docstring."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives every field without a docstring the comment of its line."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and isinstance(attr.filepath, Path) and attr.lineno is not None:
            comment = comment_of(attr.filepath.read_text(encoding="utf-8").splitlines()[attr.lineno - 1])
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr, lineno=attr.lineno)


def comment_of(line: str) -> str:
    """The comment at the end of a line of code, as a sentence; empty if there is none."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, IndentationError):  # a line that is only part of a statement
        return ""
    words = next((t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT), "")
    return words[:1].upper() + words[1:] + ("" if not words or words.endswith((".", "…")) else ".")
