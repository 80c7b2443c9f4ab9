"""Byte-level training runs, as the studies of query weights and of head plans make them."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from deadweight.source.plain_text import check_text, read_text
from deadweight.train.data import TokenSplit
from deadweight.train.settings import Train

TextOption = Annotated[str, typer.Option("--text", help="A text file; its last twentieth is the validation text.")]
StepsOption = Annotated[int, typer.Option("--steps", help="Optimizer steps of every run.")]
BatchOption = Annotated[int, typer.Option("--batch", help="Sequences per step.")]
SeedsOption = Annotated[int, typer.Option("--seeds", help="Seeds of every variant.")]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help="Variants to run; default: all.")]


def read_bytes(text: str) -> TokenSplit:
    """One token per byte of the text."""
    read = read_text(text, print)
    check_text(read, text)
    tokens = np.frombuffer(read, dtype=np.uint8)
    cut = len(tokens) * 95 // 100
    return TokenSplit(tokens[:cut], tokens[cut:])


def train_settings(steps: int, batch: int) -> Train:
    return Train(steps=steps, batch=batch, warmup=max(1, steps // 20), log_every=max(1, steps // 60))


def say(line: str) -> None:
    print(f"  {line}", flush=True)
