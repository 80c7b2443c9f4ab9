"""Silence loggers and warnings of other libraries for a while, where they say nothing that a user could act on."""

from __future__ import annotations

import logging
import warnings
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


@contextmanager
def without_jit_warnings() -> Iterator[None]:
    """Hide that torch itself still uses torch.jit: its forward-mode gradients do when they are first used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        yield
