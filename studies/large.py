"""All studies at 38 M parameters, one after the other, in as many calls as it takes.

12 layers of width 512, context 512, 67 M bytes of enwik8 in its usual split (90 M to train on, the next 5 M to judge
by). The record says what is done; a call goes on from there, starts no job that would not end in time, and appends
each result at once.

    python studies/large.py --list                                             what is done, what is left, GPU minutes
    python studies/large.py --text enwik8.xz --record studies/large.jsonl --minutes 9
    python studies/large_report.py studies/large.jsonl --markdown docs/at-scale.md
"""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import large_record
import large_shapes
import typer
from large_plan import BATCH, PARTS, STEPS, StudyPlan, expected_jobs

from deadweight.errors import DeadweightError
from deadweight.source.plain_text import check_text, read_text
from deadweight.train.gpu_queue import Agenda, Queue, WorkerSetup
from deadweight.train.repeated_runs import TimedCurve, TrainingJob
from deadweight.train.settings import Train

SPLIT = (90, 95)  # hundredths of the text: where training text and validation text end
EXPECTED = 45.0  # seconds of one run, before any is measured
SIDE_BY_SIDE = 3
RECORD = Path(__file__).with_suffix(".jsonl")


def main(
    text: Annotated[str | None, typer.Option(help="A text file; .xz is unpacked.")] = None,
    record: Annotated[Path, typer.Option(help="JSON lines; runs that it has are not repeated.")] = RECORD,
    minutes: Annotated[float, typer.Option(help="Time limit; no job is started that would exceed it.")] = 9.0,
    plain: Annotated[bool, typer.Option("--plain", help="Without CUDA graphs.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Train nothing: show what is done and what is left.")] = False,
) -> None:
    """Train what is left, the most decisive comparison first."""
    if listed or text is None:
        print("\n".join(listing(large_record.read_record(record))))
        if not listed:
            raise DeadweightError("expected --text FILE to train on, or --list")
        return
    go_on(text, record, 60 * minutes, graphs=not plain)


def seconds_of(runs: list[large_record.Run]) -> float:
    """GPU seconds of one run, with what it takes besides its steps."""
    known = [r["seconds"][-1] / r["side_by_side"] for r in runs if r.get("side_by_side") and r["steps"] == STEPS]
    return statistics.median(known) + 2.0 if known else EXPECTED


def listing(record: list[large_record.Run]) -> list[str]:
    """One line per comparison: runs and GPU minutes that are left, if the first rate of every sweep is the best."""
    runs = large_record.runs_of(record)
    each, left = seconds_of(runs), Counter[str]()
    for part, job in expected_jobs(runs):
        left[part.question] += len(job.members)
    rows, gone = [], 0
    for part in PARTS:
        gone += left[part.question]
        state = f"{left[part.question]:3d} runs, {gone * each / 60:5.1f} min" if left[part.question] else "done"
        rows.append(f"{state:20} {part.study:6} {part.question} ({', '.join(part.variants)})")
    return [f"{len(runs)} runs in the record; a run takes {each:.0f} s of the GPU; minutes are summed up", *rows]


def go_on(text: str, file: Path, seconds: float, *, graphs: bool = True) -> None:
    """Train what is left until the time is over."""
    with TemporaryDirectory() as folder:
        raw = Path(folder) / "text"
        length = unpack(text, raw)
        before = large_record.read_record(file)
        now = large_record.setting(text, raw, large_shapes.SIZES, BATCH, SPLIT)
        large_record.check_same(file, before, now)
        large_record.append(file, now)
        runs = large_record.runs_of(before)
        cuts = length * SPLIT[0] // 100, length * SPLIT[1] // 100

        def keep(job: TrainingJob, results: list[TimedCurve]) -> None:
            for line in large_record.lines_of(job, results):
                runs.append(line)
                large_record.append(file, line)

        def setup(graph: str) -> WorkerSetup:
            return WorkerSetup(
                large_shapes.config(graph), Train(batch=BATCH), raw, cuts, graphs=graphs, side_by_side=SIDE_BY_SIDE
            )

        agenda = Agenda(lambda: StudyPlan(runs).left(), setup, keep)
        Queue(agenda, seconds=seconds, run_seconds=seconds_of(runs) / STEPS, progress=say).run()
        print("\n".join(listing(large_record.read_record(file))))


def unpack(text: str, raw: Path) -> int:
    read = read_text(text, print)
    check_text(read, text)
    raw.write_bytes(read)
    return len(read)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
