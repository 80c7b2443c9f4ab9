"""A short pilot run: a model with equal heads, trained on the text, shows in which layers the softmax saturates."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from deadweight.allocate.plan import UniformShape
from deadweight.progress import Progress, silent


@dataclass(frozen=True)
class PilotSettings:
    """The text of a pilot run, and how long it trains."""

    text: str
    tokenizer: str = "bytes"
    steps: int = 300
    batch: int = 16
    sharing: int = 1  # query heads per key-value head


@dataclass(frozen=True)
class Pilot:
    """The result of a pilot run."""

    settings: PilotSettings
    bits_per_byte: float
    factors: tuple[float, ...]  # by layer

    @property
    def source(self) -> str:
        steps, text = self.settings.steps, self.settings.text
        return f"saturation after {steps:,} steps on {text} ({self.bits_per_byte:.3f} bits per byte)"


def pilot(
    shape: UniformShape, settings: PilotSettings, *, keep: Path | None = None, progress: Progress = silent
) -> Pilot:
    """Train a model with equal heads and measure the saturation of its layers. `keep`: where to leave the model."""
    from deadweight.saturation.run import saturation
    from deadweight.train.loop import train
    from deadweight.train.result import Listener
    from deadweight.train.settings import make_run

    steps = settings.steps
    model = {
        "d_model": shape.d_model,
        "n_layers": shape.n_layers,
        "heads": shape.heads,
        "key_heads": shape.heads // settings.sharing,
        "context": shape.context,
    }
    training = {"steps": steps, "batch": settings.batch, "warmup": max(1, steps // 10), "evaluate_every": steps}
    data = {"text": settings.text, "tokenizer": settings.tokenizer}
    run = make_run({"model": model, "data": data, "train": training})
    with tempfile.TemporaryDirectory() as folder:
        out = keep or Path(folder) / "pilot"
        listener = Listener(tell=lambda update: progress("pilot run", update.step, steps))
        trained = train(run, out, listener=listener)
        measured = saturation(out, settings.text, progress=progress)
    return Pilot(settings, trained.bits_per_byte, measured.factors)
