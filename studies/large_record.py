"""The record of the studies at 38 M parameters: JSON lines, one per call (its setting) and one per run.

Lines are only appended, each when its run is finished, so a call that is cut off loses the job it was training and
nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from deadweight.errors import DeadweightError
from deadweight.report.circumstances import circumstances
from deadweight.train.ensemble import Member
from deadweight.train.repeated_runs import TimedCurve, TrainingJob

Run = dict[str, Any]


def read_record(file: Path) -> list[dict[str, Any]]:
    """The lines of a record; a line that was cut off is left out."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in map(parsed, lines) if line is not None]


def parsed(line: str) -> dict[str, Any] | None:
    """A line of a record; None if it was cut off."""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found


def append(file: Path, line: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    broken = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as out:
        out.write(("\n" if broken else "") + json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def runs_of(record: list[dict[str, Any]]) -> list[Run]:
    return [line for line in record if line["kind"] == "run"]


def setting(text: str, raw: Path, sizes: dict[str, int], batch: int, split: tuple[int, int]) -> dict[str, Any]:
    """What all runs of one call share."""
    bytes_of = np.memmap(raw, dtype=np.uint8, mode="r")
    return {
        "kind": "setting",
        "text": Path(text).name,
        "bytes": len(bytes_of),
        "text_sha256": hashlib.sha256(bytes_of).hexdigest(),
        "split": list(split),
        "sizes": sizes,
        "batch": batch,
        **circumstances(),
    }


def check_same(file: Path, before: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """A record continues with the text, the sizes and the batch that it began with."""
    for key in ("text_sha256", "sizes", "batch"):
        if before and before[0][key] != now[key]:
            raise DeadweightError(f"{file} was made with another {key}; expected the same: name another file")


def lines_of(job: TrainingJob, results: list[TimedCurve]) -> Iterator[Run]:
    """The lines of a finished job."""
    for result in results:
        curve = result.curve
        yield {
            "kind": "run",
            "graph": job.graph,
            "steps": job.steps,
            "member": asdict(curve.member),
            "upkeep": job.upkeep,
            "every": job.every if job.upkeep else None,
            "judged_on": job.judged_on,
            "valid_loss": curve.valid_loss if math.isfinite(curve.valid_loss) else None,
            "rounded": {str(bits): loss for bits, loss in result.rounded.items()},
            "diverged_at": curve.diverged_at,
            "side_by_side": len(results),
            "graphs": result.graphs,
            "tokens_per_second": round(result.tokens_per_second),
            "gigabytes": None if result.gigabytes is None else round(result.gigabytes, 2),
            "at": list(curve.steps),
            "train_loss": [round(x, 5) if math.isfinite(x) else None for x in curve.train_loss],
            "seconds": [round(x, 2) for x in result.seconds],
        }


def member_of(run: Run) -> Member:
    return Member(**run["member"])


def loss_of(run: Run) -> float:
    """Nats per byte; infinite if the run diverged."""
    return math.inf if run["valid_loss"] is None else float(run["valid_loss"])
