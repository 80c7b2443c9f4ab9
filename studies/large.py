"""All studies at 38 M parameters, one after the other, in as many calls as it takes.

12 layers of width 512, context 512, 67 M bytes of enwik8 in its usual split (90 M to train on, the next 5 M to judge
by), some comparisons 157 M. The record says what is done; a call goes on from there, starts no job that would not end
in time, and appends each result at once. A call needs torch and transformers, nothing else.

    python studies/large.py --list                                             what is done, what is left, GPU minutes
    python studies/large.py --text enwik8.xz --record studies/large.jsonl --minutes 9
    python studies/large_report.py studies/large.jsonl --markdown docs/at-scale.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import large_record
import large_shapes
from large_plan import BATCH, PARTS, SIDE_BY_SIDE, STEPS, Part, StudyPlan, expected_jobs

from deadweight.source.plain_text import check_text, read_text
from deadweight.train.gpu_queue import Agenda, Queue, WorkerSetup
from deadweight.train.repeated_runs import TimedCurve, TrainingJob
from deadweight.train.settings import Train

SPLIT = (90, 95)  # hundredths of the text: where training text and validation text end
EXPECTED = 45.0  # seconds of one run, before any is measured
RECORD = Path(__file__).with_suffix(".jsonl")


def main(arguments: list[str]) -> None:
    """Train what is left, the most decisive comparison first."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--text", help="a text file; .xz is unpacked")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines; runs that it has are not repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="no job is begun that would end later")
    parser.add_argument("--plain", action="store_true", help="without CUDA graphs")
    parser.add_argument("--list", action="store_true", help="train nothing: show what is done and what is left")
    told = parser.parse_args(arguments)
    if told.list:
        print("\n".join(listing(large_record.read_record(told.record))))
    elif told.text is None:
        parser.error("expected --text FILE to train on, or --list")
    else:
        go_on(told.text, told.record, 60 * told.minutes, graphs=not told.plain)


def seconds_of(runs: list[large_record.Run]) -> float:
    """GPU seconds of one run, with what it takes besides its steps."""
    known = [r["seconds"][-1] / r["side_by_side"] for r in runs if r.get("side_by_side") and r["steps"] == STEPS]
    return statistics.median(known) + 4.0 if known else EXPECTED


def listing(record: list[large_record.Run]) -> list[str]:
    """One line per comparison: runs and GPU minutes that are left, if the first rate of every sweep is the best."""
    runs = large_record.runs_of(record)
    each, left = seconds_of(runs), defaultdict[Part, list[int]](list)
    for part, job in expected_jobs(runs):
        left[part] += [job.steps] * len(job.members)
    rows, steps = [], 0
    for part in PARTS:
        steps += sum(left[part])
        state = f"{len(left[part]):3d} runs, {steps / STEPS * each / 60:5.1f} min" if left[part] else "done"
        rows.append(f"{state:20} {part.study:6} {part.question} ({', '.join(part.variants)})")
    head = f"{len(runs)} runs in the record; {STEPS:,} steps take {each:.0f} s of the GPU; minutes are summed up"
    return [head, *rows]


def go_on(text: str, file: Path, seconds: float, *, graphs: bool = True) -> None:
    """Train what is left until the time is over."""
    end = time.perf_counter() + seconds
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
        expected = seconds_of(runs) * SIDE_BY_SIDE / STEPS, SIDE_BY_SIDE
        Queue(agenda, seconds=end - time.perf_counter(), expected=expected, progress=say).run()
        print("\n".join(listing(large_record.read_record(file))))


def unpack(text: str, raw: Path) -> int:
    read = read_text(text, print)
    check_text(read, text)
    raw.write_bytes(read)
    return len(read)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
