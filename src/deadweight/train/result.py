"""What a training run tells: while it goes on, and at its end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Update:
    """One line of metrics.jsonl. `loss` is in nats per token, a mean since the line before."""

    step: int
    tokens: int
    seconds: float
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    valid_loss: float | None = None
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class Trained:
    """The end of a run."""

    out: Path
    parameters: int
    steps: int
    tokens: int
    seconds: float
    valid_loss: float  # nats per token
    bits_per_byte: float
    tokens_per_second: float


class Metrics:
    """metrics.jsonl: appended to, and cut back to the step that a run is resumed at."""

    def __init__(self, file: Path, resumed_at: int) -> None:
        self.file = file
        kept = [line for line in self.lines() if line["step"] <= resumed_at] if resumed_at else []
        file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def lines(self) -> list[dict[str, Any]]:
        if not self.file.is_file():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def add(self, update: Update) -> None:
        told = {k: v for k, v in asdict(update).items() if v is not None}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
