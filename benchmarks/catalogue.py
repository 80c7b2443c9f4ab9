"""The catalogue: every model type that transformers knows, which of its parameters are redundant, and the proofs.

python benchmarks/catalogue.py                               all types; goes on where it was stopped
python benchmarks/catalogue.py --types gpt2,llama            only these
python benchmarks/catalogue.py --redo crash,timeout          these results once more
python benchmarks/catalogue.py --read --pages build/catalogue --markdown docs/catalogue.md     only the pages

Each type is opened, traced and searched as `benchmarks/coverage.py` does it, at the width of its default config and
with as few layers as show every kind of layer; where that takes too long, as a narrow clone. Every type runs in a
process of its own, which ends by itself when its time is over: a type that fails, hangs or crashes is one row of the
record. Claims are proved and their structure is checked. Evidence on narrow clones is taken by
`benchmarks/coverage.py`, counts by `benchmarks/accounts.py`; their records are on the pages too.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import importable_torchvision  # noqa: F401
import torch
import transformers
import typer
from catalogue_pages import summary_page, write_pages
from catalogue_record import Record, TypeEntry
from coverage import KINDS, MEMORY, NO_MEMORY, Expired, attempt, deadline, in_words, opened, with_libraries
from coverage_words import PATH
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deadweight.audit.checker import structure
from deadweight.audit.findings import expand, to_finding
from deadweight.audit.result import Finding
from deadweight.audit.unknowns import unknowns
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import TraceError, trace
from deadweight.laws.catalogue import search
from deadweight.report.audit_rows import group_findings, group_unknown
from deadweight.report.name_pattern import collapse
from deadweight.source.model import Source
from deadweight.source.narrow_clone import narrow
from deadweight.source.printable import reason
from deadweight.version import __version__

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "catalogue.json.gz"
CATALOGUED = ("causal", "masked", "base")  # the kinds of types that coverage.py counts
PATIENCE = 20  # a process that takes so many times its processor time of wall time is ended; longer on a busy machine
ENDING = 10  # seconds in which a process that has closed its pipe ends
SAVING = 60  # seconds between two savings of the record: a run that is killed loses no more than this
Row = dict[str, Any]


def catalogue_type(kind: str, model_type: str, seconds: int) -> Row:
    """One type: the fields of a TypeEntry."""
    start = time.process_time()
    row: Row = {}
    for as_narrow in (False, True):  # a wide model that takes too long is proved on its narrow clone
        try:
            with deadline(seconds):
                row = examine(kind, model_type, as_narrow=as_narrow)
            break
        except Expired as error:
            row = {"status": "timeout", "reason": str(error)}
    return {"kind": kind, "type": model_type, "seconds": round(time.process_time() - start, 2), **row}


def examine(kind: str, model_type: str, *, as_narrow: bool = False) -> Row:
    try:
        form, source = opened(kind, model_type)
        if as_narrow:
            form, source = f"{form}, narrow", narrow(source)
    except Exception as error:  # noqa: BLE001 - a stranger's code: every failure is a result here
        return {"status": "nothing", "reason": in_words(reason(error))}
    form = with_libraries(form, source)
    try:
        return {"form": form, **prove(source)}
    except TraceError:
        if not as_narrow:  # the clone has values: code that reads them can be traced with those of the example
            return examine(kind, model_type, as_narrow=True)
        failed = attempt(kind, model_type, as_narrow=True)  # what is left without a graph
        return {"form": form, "status": failed["status"], "reason": PATH.sub("its config", failed["reason"])}


def prove(source: Source) -> Row:
    """The findings of a model by law and pattern of names, what its biases are worth, and what is unknown."""
    graph = canonical(trace(source.module, source.args, source.kwargs))
    prover = search(graph)
    refused = structure(graph, prover.claims)
    claims = [claim for i, claim in enumerate(prover.claims) if i not in refused]
    findings = list(expand(source, (to_finding(graph, claim) for claim in claims)))
    doubts = group_unknown(unknowns(prover))
    return {
        "status": "proofs" if findings else "clean",
        "reason": "",
        "class_name": type(source.module).__name__,
        "parameters": sum(torch.Size(shape).numel() for shape in source.shapes.values()),
        "rows": [
            {
                "code": g.code,
                "law": g.law,
                "verdict": g.verdict,
                "tier": g.tier,
                "note": g.note,
                "where": g.where,
                "dof": g.dof,
                "into": [str(pattern) for pattern in g.into][:6],
                "proof": list(g.findings[0].proof),
            }
            for g in group_findings(findings)
        ],
        "biases": list(judge_biases(source, findings, {u.parameter for u in unknowns(prover)})),
        "unknown": [{"where": str(d.pattern), "blocked_by": d.blocked_by or "", "why": d.why} for d in doubts],
    }


def judge_biases(source: Source, findings: list[Finding], doubted: set[str]) -> list[Row]:
    """Every bias of the model, layers taken together: how much of it is redundant, and by which laws."""
    of_bias: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.verdict != "gauge":
            of_bias[finding.parameter].append(finding)
    alike: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, shape in source.shapes.items():
        if name.rpartition(".")[2].endswith("bias") and len(shape) == 1:
            mine = of_bias.get(name, [])
            verdict = judge_bias(shape[0], mine, name in doubted)
            alike[verdict, shape[0], tuple(sorted({f.code for f in mine}))].append(name)
    return [
        {"where": str(pattern), "elements": elements, "verdict": verdict, "laws": list(codes)}
        for (verdict, elements, codes), names in alike.items()
        for pattern in collapse(names)
    ]


def judge_bias(elements: int, findings: list[Finding], doubted: bool) -> str:
    """dead, folds, or how many of its dimensions are redundant; unknown or live if none is."""
    dof = Counter({verdict: sum(f.dof for f in findings if f.verdict == verdict) for verdict in ("dead", "folds")})
    if dof["dead"] >= elements:
        return "dead"
    if dof.total() >= elements:
        return "folds"
    if dof.total():
        return f"{dof.total()} of {elements} redundant"
    return "unknown" if doubted else "live"


@dataclass(frozen=True)
class Job:
    """A type that runs in a process of its own."""

    kind: str
    model_type: str
    process: Any
    answer: Any  # the end of a pipe
    started: float


def run_types(
    todo: list[tuple[str, str]], record: Record, workers: int, seconds: int, file: Path, code: str = ""
) -> Record:
    """The record with these types, saved now and then and at the end, also of a run that is interrupted."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once, in one thread
    if todo:
        warm_up()
    waiting, running, saved = list(reversed(todo)), list[Job](), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("proving", total=len(todo))
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(start_job(context, *waiting.pop(), seconds))
                for job in finished_jobs(running, seconds * PATIENCE * crowding()):
                    running.remove(job)
                    record = record.with_entry(TypeEntry.from_row(collect(job) | {"code": code}))
                    bar.update(task, advance=1, description=job.model_type)
                if time.monotonic() - saved > SAVING:
                    record.save(file)
                    saved = time.monotonic()
        finally:
            record.save(file)
    return record


def warm_up() -> None:
    """Trace one model before processes are forked: what torch.export imports at its first use costs a second each."""
    torch.set_num_threads(1)  # a process with more threads cannot be forked safely
    with contextlib.suppress(Exception):  # its own entry says what is wrong
        examine("causal", "gpt2", as_narrow=False)


def start_job(context: Any, kind: str, model_type: str, seconds: int) -> Job:
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer_type, args=(theirs, kind, model_type, seconds), daemon=True)
    process.start()
    theirs.close()
    return Job(kind, model_type, process, mine, time.monotonic())


def answer_type(pipe: Any, kind: str, model_type: str, seconds: int) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    row: Row = {"kind": kind, "type": model_type}
    try:
        row = catalogue_type(kind, model_type, seconds)
    except Exception as error:  # noqa: BLE001 - our own bug, to be named and counted
        if isinstance(error, MemoryError) or NO_MEMORY in str(error):
            row |= {"status": "timeout", "reason": f"more than {MEMORY >> 30} GiB of memory"}
        else:
            row |= {"status": "crash", "reason": reason(error)}
    pipe.send(row)


def crowding() -> float:
    """How many processes share a core, at least one: as many times as long an answer may take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def finished_jobs(running: list[Job], patience: float) -> list[Job]:
    """Those that have answered, died, or taken too long."""
    multiprocessing.connection.wait([job.answer for job in running], timeout=1)
    late = [job for job in running if time.monotonic() - job.started > patience]
    return [job for job in running if job in late or job.answer.poll() or not job.process.is_alive()]


def collect(job: Job) -> Row:
    """What a process answered; what became of it, if it did not."""
    row: Row = {"kind": job.kind, "type": job.model_type}
    late = not job.answer.poll() and job.process.is_alive()
    try:
        row = {**row, "status": "timeout", "reason": "no answer in time"} if late else job.answer.recv()
    except EOFError:  # its end of the pipe is closed: it is ending
        job.process.join(ENDING)
        row |= {"status": "crash", "reason": f"its process ended with status {job.process.exitcode}"}
    job.process.kill()
    job.process.join()
    job.answer.close()
    return row


def choose_types(
    record: Record, kinds: list[str], types: str, redo: str, versions: dict[str, str]
) -> list[tuple[str, str]]:
    """The types to run: those that the record lacks or has of other versions, and those whose results are redone."""
    wanted = set(types.split(",")) if types else None
    every = [(kind, name) for kind in kinds for name in KINDS[kind] if wanted is None or name in wanted]
    if not every:
        raise DeadweightError(f"no type of {', '.join(kinds)} is called {types}")
    fresh = record.versions == versions
    done = {(e.kind, e.type) for e in record.entries if fresh and e.status not in redo.split(",")}
    return [pair for pair in every if pair not in done]


def main(
    kind: Annotated[list[str], typer.Option(help="causal, masked or base; repeatable.")] = list(CATALOGUED),  # noqa: B006
    types: Annotated[str, typer.Option(help="Only these types, separated by commas.")] = "",
    seconds: Annotated[int, typer.Option(help="Processor time for each type; its narrow clone gets as much.")] = 20,
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    redo: Annotated[str, typer.Option(help="Run these results again: crash,timeout,nothing.")] = "",
    code: Annotated[str, typer.Option(help="The commit, for the record.")] = "",
    read: Annotated[bool, typer.Option("--read", help="Run nothing.")] = False,
    file: Annotated[Path, typer.Option("--record", help="The record.")] = RECORD,
    pages: Annotated[Path | None, typer.Option(help="Write the pages into this folder.")] = None,
    page: Annotated[Path | None, typer.Option("--markdown", help="Write the page of docs/ here.")] = None,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    record = Record.load(file)
    if not read:
        versions = {
            "deadweight": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__.split("+")[0],
        }
        todo = choose_types(record, kind, types, redo, versions)
        record = run_types(todo, record.for_versions(versions), workers, seconds, file, code)
    if pages is not None:
        write_pages(record, pages)
    if page is not None:
        page.write_text(summary_page(record), encoding="utf-8")
    counts = Counter(entry.status for entry in record.entries)
    print(json.dumps({"types": len(record.entries), **counts}))


if __name__ == "__main__":
    typer.run(main)
