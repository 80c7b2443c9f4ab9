"""Training: text to tokens, the loop, checkpoints; from one process to many machines."""

from __future__ import annotations

from deadweight.train.loop import train
from deadweight.train.result import Trained, Update
from deadweight.train.settings import Data, Run, Train, make_run, read_run

__all__ = ["Data", "Run", "Train", "Trained", "Update", "make_run", "read_run", "train"]
