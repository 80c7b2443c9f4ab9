"""A short pilot run: the default with equal heads, trained on the text, shows which layers' softmax saturates."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from deadweight.allocate.plan import Shape
from deadweight.progress import Progress, silent

STEPS, BATCH = 300, 16


@dataclass(frozen=True)
class Pilot:
    """What a pilot run showed."""

    text: str
    steps: int
    bits_per_byte: float
    factors: tuple[float, ...]

    @property
    def source(self) -> str:
        return f"saturation after {self.steps:,} steps on {self.text} ({self.bits_per_byte:.3f} bits per byte)"


def pilot(
    shape: Shape,
    text: str,
    *,
    tokenizer: str = "bytes",
    steps: int = STEPS,
    batch: int = BATCH,
    sharing: int = 1,
    keep: Path | None = None,
    progress: Progress = silent,
) -> Pilot:
    """Train the default of this shape and measure the saturation of its layers; the model stays only in `keep`."""
    from deadweight.saturation.run import saturation
    from deadweight.train.loop import train
    from deadweight.train.settings import make_run

    model = {
        "d_model": shape.d_model,
        "n_layers": shape.n_layers,
        "heads": shape.heads,
        "key_heads": shape.heads // sharing,
        "context": shape.context,
    }
    settings = {"steps": steps, "batch": batch, "warmup": max(1, steps // 10), "evaluate_every": steps}
    run = make_run({"model": model, "data": {"text": text, "tokenizer": tokenizer}, "train": settings})
    with tempfile.TemporaryDirectory() as folder:
        out = keep or Path(folder) / "pilot"
        trained = train(run, out, tell=lambda update: progress("pilot run", update.step, steps))
        measured = saturation(out, text, progress=progress)
    return Pilot(text, steps, trained.bits_per_byte, measured.factors)
