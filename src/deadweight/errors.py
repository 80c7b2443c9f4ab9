"""The one exception a user sees: what was found, what was expected, what to do."""

from __future__ import annotations


class DeadweightError(ValueError):
    """A user's mistake or a bad input; its message is one readable line, never a traceback at the terminal."""
