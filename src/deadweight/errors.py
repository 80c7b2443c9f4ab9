"""The exception for mistakes of a user: what was found, what was expected, what to do."""

from __future__ import annotations


class DeadweightError(ValueError):
    """A user's mistake or a bad input. Its message is one line; the command prints it without a traceback."""
