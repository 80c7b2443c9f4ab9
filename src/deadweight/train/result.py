"""The measurements of a training run, and its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deadweight.progress import Progress, silent

RESULT = "trained.json"  # inside OUT, once the run is finished


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
    """A finished run."""

    out: Path
    parameters: int
    steps: int
    tokens: int
    seconds: float
    valid_loss: float  # nats per token
    bits_per_byte: float
    tokens_per_second: float
    text_bytes: int = 0  # of the training text: `evaluate` recognises a text that begins with it
    text_sha256: str = ""
    finished_before: bool = False  # an earlier call finished the run: nothing was trained this time


def write_result(result: Trained) -> None:
    data = {name: value for name, value in asdict(result).items() if name not in ("out", "finished_before")}
    (result.out / RESULT).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_result(out: Path) -> Trained | None:
    """The result of a run that is finished; None if there is no such run, or its weights are gone."""
    try:
        data = json.loads((out / RESULT).read_text(encoding="utf-8"))
        return Trained(out=out, **data, finished_before=True) if any(out.glob("*.safetensors")) else None
    except (OSError, ValueError, TypeError):
        return None


def ignore(update: Update) -> None:
    """Ignore every measurement."""


@dataclass(frozen=True)
class Listener:
    """Functions that a run calls: `tell` with every measurement, `say` with what is being done."""

    tell: Callable[[Update], None] = ignore
    progress: Progress = silent


class Metrics:
    """metrics.jsonl: lines are appended; when a run is resumed, later lines are removed."""

    def __init__(self, file: Path, resumed_at: int) -> None:
        self.file = file
        kept = [update for update in self.read() if update.step <= resumed_at] if resumed_at else []
        file.write_text("".join(map(as_line, kept)), encoding="utf-8")

    def read(self) -> list[Update]:
        if not self.file.is_file():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [Update(**json.loads(line)) for line in lines if line.endswith("}")]

    def add(self, update: Update) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(as_line(update))


def as_line(update: Update) -> str:
    return json.dumps({k: v for k, v in asdict(update).items() if v is not None}) + "\n"
