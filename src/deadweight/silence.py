"""Silence the loggers of other libraries for a while, where our own message replaces theirs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Only critical messages of these loggers pass inside the block; their levels are restored afterwards.

    So do those below them that have a level of their own, torch.__trace below torch.
    """
    below = [n for n in logging.root.manager.loggerDict if n.startswith(tuple(f"{name}." for name in names))]
    loggers = [logging.getLogger(name) for name in (*names, *below)]
    loggers = [logger for logger in loggers if logger.name in names or logger.level != logging.NOTSET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
