"""Silence the loggers of other libraries for a while, where our own message replaces theirs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Only critical messages of these loggers pass inside the block; their levels are restored afterwards."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
