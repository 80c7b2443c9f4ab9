"""Training: text to tokens, the loop, checkpoints; from one process to many machines.

The settings need no torch; `train` imports it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from deadweight.train.result import Listener, Trained, Update
from deadweight.train.settings import Data, Run, Train, make_run, read_run

if TYPE_CHECKING:
    from deadweight.train.loop import train

__all__ = ["Data", "Listener", "Run", "Train", "Trained", "Update", "make_run", "read_run", "train"]


def __getattr__(name: str) -> object:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("deadweight.train.loop"), name)
