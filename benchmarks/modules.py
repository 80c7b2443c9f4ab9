"""Which plain PyTorch modules get proofs, how long that takes, and why the others do not get them.

python benchmarks/modules.py --list
python benchmarks/modules.py --site SITE --checkouts CHECKOUTS --seconds 150 --jobs 2
python benchmarks/modules.py --site SITE --only 'timm/*' --resume
python benchmarks/modules.py --read benchmarks/results/modules.json --markdown docs/modules.md

Every module of the corpus (`benchmarks/corpus`) is built and audited in a process of its own, with a limit of time and
of memory. Seconds and memory are those of `deadweight.audit`, beyond what importing and building took: processes are
forked from one that has imported torch, transformers and deadweight. Seconds are CPU seconds: an audit runs on one
thread, and what else the machine does is not counted.

SITE is a folder of further packages (`pip install --no-deps --target SITE timm …`), CHECKOUTS one of repositories
(nanoGPT, minGPT, llama2.c, nanochat, litgpt, llm.c, and those that `corpus/research.py` names), each under its own
name. What is not there is skipped and said.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import fnmatch
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Annotated, Any

import typer
from corpus.entry import Entry
from foreign_operators import skip_fakes
from rich.console import Console
from rich.progress import track

from deadweight.progress import Progress
from deadweight.report import record
from deadweight.source.type_aliases import JsonObject

HERE = Path(__file__).resolve()
RESULTS, PAGE = HERE.parent / "results" / "modules.json", HERE.parents[1] / "docs" / "modules.md"
MIB, GIB = 1 << 20, 1 << 30
WAITING, BUILDING = 8, 180  # the longest that a process may live: so many limits of its audit, and these seconds
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["transformers", "torch._dynamo", "torch._export.converter", "deadweight.audit.run"])
OUTCOMES = {
    "proofs": "traced, and at least one finding is proved",
    "proofs, specialised": "proved of a trace on given values",
    "proofs, no evidence": "proved, but the numerical evidence could not be taken",
    "nothing found": "traced, and no law applies",
    "evidence only": "not traced: gradients, no proof",
    "error": "refused with one line",
    "crash": "any other exception, which is our bug",
    "timeout": "over the time limit; the reason says where it was then",
    "out of memory": "over the memory limit",
    "not built": "the corpus could not build it",
    "skipped": "a package or a checkout is not there",
}
NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError|failed to map segment")


@dataclass(frozen=True)
class Row:
    """What became of one module."""

    name: str
    outcome: str  # one of OUTCOMES
    reason: str = ""
    parameters: int = 0
    findings: int = 0
    redundant: int = 0  # dimensions
    unknown: int = 0
    seconds: float = 0.0  # of CPU time of the audit, beyond importing and building
    memory: int = 0  # bytes of peak resident memory, beyond importing and building
    measured: int | None = None  # redundant dimensions that the account counted
    explained: int | None = None  # and those that the laws explain


@dataclass(frozen=True)
class Limits:
    """What a process may use, and where it finds the modules."""

    seconds: float = 150
    memory: int = 8 * GIB
    site: tuple[Path, ...] = ()
    checkouts: Path | None = None
    corpus: str = "corpus"


# In the process of one module.


def run_child(name: str, limits: Limits, out: Path, said: Path) -> None:
    """Build the module and audit it; `out` says at every time how far it is, `said` is what it prints."""

    def tell(**facts: Any) -> None:
        out.write_text(json.dumps(facts), encoding="utf-8")

    print_to(said)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
    tell(stage="building")
    try:
        entry, module, inputs = build(name, limits)
    except Exception as error:  # noqa: BLE001 - a stranger's code: every failure is a result here
        tell(**failed("not built", error))
        return
    size = sum(p.numel() for p in module.parameters())
    tell(stage="opening the model", parameters=size)
    result = examined(entry, module, inputs, limits, lambda stage, *_: tell(stage=stage, parameters=size))
    tell(parameters=size, **result)


def print_to(file: Path) -> None:
    """Whatever this process prints from now on goes to the file."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(target, stream.fileno())
    warnings.filterwarnings("ignore")


def build(name: str, limits: Limits) -> tuple[Entry, Any, Any]:
    """The entry of that name, its module and its inputs."""
    import torch

    entry = next(e for e in entries_of(limits) if e.name == name)
    if entry.checkout and limits.checkouts:
        sys.path.append(str(limits.checkouts / entry.checkout))
    skip_fakes("torchvision::")
    torch.manual_seed(0)
    return entry, *entry.make()


def entries_of(limits: Limits) -> list[Entry]:
    """The corpus that is asked for."""
    return importlib.import_module(limits.corpus).ENTRIES


def examined(entry: Entry, module: Any, inputs: Any, limits: Limits, say: Progress) -> dict[str, Any]:
    """Audit under the time limit: the outcome and what was found, with seconds and memory."""
    import deadweight
    from deadweight.errors import DeadweightError

    before, start = peak(), time.process_time()
    with alarm(limits.seconds):
        try:
            options = {"complete": entry.complete, "training": entry.training}
            result = summary(deadweight.audit(module, inputs, progress=say, **options))
        except DeadweightError as error:
            result = failed("error", error)
        except Exception as error:  # noqa: BLE001 - our own bug, to be named and counted
            result = failed("crash", error)
    return {**result, "seconds": round(time.process_time() - start, 2), "memory": peak() - before}


def summary(audit: Any) -> dict[str, Any]:
    """The outcome of an audit that came back, and its counts."""
    outcome, reason = judged(audit)
    counted = audit.completeness
    return {
        "outcome": outcome,
        "reason": first_line(reason),
        "findings": len(audit.findings),
        "redundant": audit.redundant,
        "unknown": len(audit.unknown),
        "measured": counted and counted.measured,
        "explained": counted and counted.explained,
    }


def judged(audit: Any) -> tuple[str, str]:
    """One of OUTCOMES, and the reason."""
    if audit.untraced is not None:
        return "out of memory" if NO_MEMORY.search(audit.untraced) else "evidence only", audit.untraced
    if not audit.findings:
        return "nothing found", audit.untested or ""
    if audit.untested is not None or all(finding.evidence is None for finding in audit.findings):
        return "proofs, no evidence", audit.untested or "no gradient is finite"
    return ("proofs, specialised", audit.specialised) if audit.specialised else ("proofs", "")


def failed(status: str, error: Exception) -> dict[str, Any]:
    """An exception as a result: its first line, and the place where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        return {"outcome": "out of memory", "reason": first_line(text)}
    if status != "crash":
        return {"outcome": status, "reason": first_line(str(error) if status == "error" else text)}
    where = traceback.extract_tb(error.__traceback__)[-1]
    return {"outcome": status, "reason": f"{first_line(text)} in {Path(where.filename).name}:{where.lineno}"}


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """The system ends this process after so many CPU seconds, whatever runs in it; its stack is printed first."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, file=sys.stderr, chain=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# In the process that runs them all.


def attempt(entry: Entry, limits: Limits) -> Row:
    """One module in a process of its own."""
    if missing := lacks(entry, limits):
        return Row(entry.name, "skipped", missing)
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "row.json", Path(folder) / "said.txt"
        code = exit_code(entry.name, limits, out, said)
        facts = json.loads(out.read_text(encoding="utf-8") or "{}") if out.exists() else {}
        told = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    stage = facts.pop("stage", "")
    if "outcome" in facts:
        return Row(entry.name, **facts)
    return Row(entry.name, **killed(code, stage, told, limits), **facts)


def exit_code(name: str, limits: Limits, out: Path, said: Path) -> int | None:
    """How the process of one module ended; None if it had to be killed. It is forked after the imports."""
    process = CONTEXT.Process(target=run_child, args=(name, limits, out, said), daemon=True)
    process.start()
    process.join(WAITING * limits.seconds + BUILDING)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def killed(code: int | None, stage: str, told: str, limits: Limits) -> dict[str, Any]:
    """The outcome of a process that left no result."""
    if code is None or code == -signal.SIGPROF:
        return {"outcome": "timeout", "reason": f"{stage}{place(told)}", "seconds": limits.seconds}
    if code == -signal.SIGKILL or NO_MEMORY.search(told):
        return {"outcome": "out of memory", "reason": stage}
    line = first_line("\n".join(reversed(told.splitlines())))
    return {"outcome": "crash", "reason": f"{stage}: exit status {code}: {line}"}


def place(told: str) -> str:
    """The innermost function of ours in a printed stack."""
    match = re.search(r'File ".*?/deadweight/([\w/]+\.py)", line (\d+) in (\S+)', told)
    return f", in {match[1]}:{match[2]} {match[3]}" if match else ""


def lacks(entry: Entry, limits: Limits) -> str:
    """What the entry needs and is not there; nothing if it can be built."""
    if entry.package and importlib.util.find_spec(entry.package) is None:
        return f"no package {entry.package} (--site)"
    if entry.checkout and not (limits.checkouts and (limits.checkouts / entry.checkout).is_dir()):
        return f"no checkout {entry.checkout} (--checkouts)"
    return ""


def run(
    entries: list[Entry], limits: Limits, jobs: int, keep: list[Row], save: Callable[[list[Row]], None]
) -> list[Row]:
    """All that are not done yet, `jobs` at a time; what is known is saved after each."""
    rows = {row.name: row for row in keep}
    todo = [e for e in entries if e.name not in rows or rows[e.name].outcome == "skipped"]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(attempt, entry, limits) for entry in todo]
        for done in track(as_completed(waiting), "auditing", total=len(todo), console=Console(stderr=True)):
            row = done.result()
            rows[row.name] = row
            save(list(rows.values()))
    return list(rows.values())


def ordered(rows: Iterable[Row], entries: list[Entry]) -> list[Row]:
    """In the order of the corpus; what it does not know any more goes."""
    by = {row.name: row for row in rows}
    return [by[entry.name] for entry in entries if entry.name in by]


# The page.


def markdown(rows: list[Row], setting: JsonObject) -> str:
    """The record as a page: counts first, then what has no proofs by reason, then every module."""
    tried = [row for row in rows if row.outcome != "skipped"]
    proved = [row for row in tried if row.outcome.startswith("proofs")]
    numbers = ", ".join(f"{name} {number}" for name, number in setting["versions"].items())
    lines = [
        "# Plain PyTorch modules: which get proofs",
        "",
        "This page says which plain PyTorch modules that people write and use get proofs, and how long an audit takes.",
        "",
        f"**{len(proved)} of {len(tried)} get proofs.** {speed(tried)}",
        "",
        *by_group(tried),
        f"`deadweight.audit(module, inputs)` on {len(tried)} of the {setting['corpus']} modules of "
        f"`benchmarks/corpus`, each in a process of its own with {setting['seconds']:g} s and {setting['memory']:g} "
        f"GiB. {setting['date']}, {setting['cores']} CPU cores. Seconds (of CPU time, on one thread) and memory are "
        "those of the audit, without importing and building. Written by `benchmarks/modules.py`.",
        "",
        f"Versions and commits: {numbers}.",
        "",
        *without_proofs(rows),
        *every_module(tried),
    ]
    return "\n".join(lines) + "\n"


def speed(rows: list[Row]) -> str:
    """The median and the worst of the audits that traced their module and came to an end."""
    ended = [row for row in rows if row.outcome == "nothing found" or row.outcome.startswith("proofs")]
    if not ended:
        return ""
    slow, large = max(ended, key=lambda row: row.seconds), max(ended, key=lambda row: row.memory)
    seconds, memory = (
        statistics.median(values) for values in zip(*((r.seconds, r.memory) for r in ended), strict=True)
    )
    return (
        f"Of the {len(ended)} audits that traced and ended, the median takes {seconds:.1f} s and "
        f"{memory / MIB:.0f} MiB, the slowest {slow.seconds:.0f} s ({slow.name}), "
        f"the largest {large.memory / GIB:.1f} GiB ({large.name})."
    )


def by_group(rows: list[Row]) -> list[str]:
    """Outcomes by where the modules come from."""
    seen = [word for word in OUTCOMES if any(row.outcome == word for row in rows)]
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        groups[row.name.partition("/")[0]][row.outcome] += 1
    groups["all"] = sum(groups.values(), Counter())
    lines = [table_row("from", "modules", *seen), "| --- " * (len(seen) + 2) + "|"]
    lines += [table_row(name, counts.total(), *(counts[word] for word in seen)) for name, counts in groups.items()]
    return [*lines, "", *(f"- *{word}*: {OUTCOMES[word]}" for word in seen), ""]


def without_proofs(rows: list[Row]) -> list[str]:
    """All but plain proofs, by outcome and reason; the largest groups first."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.outcome != "proofs":
            groups[row.outcome, kind(row.reason)].append(row.name)
    if not groups:
        return []
    lines = ["## Modules without plain proofs, by reason", "", "| outcome | reason | modules |", "| --- | --- | --- |"]
    largest = sorted(groups.items(), key=lambda item: (list(OUTCOMES).index(item[0][0]), -len(item[1])))
    return [*lines, *(table_row(word, why, "; ".join(names)) for (word, why), names in largest), ""]


def kind(reason: str) -> str:
    """The reason without its numbers, so that modules that fail alike stand together; the record has them."""
    plain = re.sub(r"RuntimeError: .*can't allocate memory.*", "out of memory", reason)
    return re.sub(r"(?<![A-Za-z])\d[\d,.]*", "…", plain)


def every_module(rows: list[Row]) -> list[str]:
    names = ("module", "outcome", "parameters", "findings", "redundant", "unknown", "seconds", "MiB", "explained")
    return ["## Every module", "", table_row(*names), "| --- " * len(names) + "|", *map(module_row, rows)]


def module_row(r: Row) -> str:
    explained = "" if r.measured is None else f"{r.explained} of {r.measured}"
    counts = (f"{n:,}" for n in (r.parameters, r.findings, r.redundant, r.unknown))
    return table_row(r.name, r.outcome, *counts, f"{r.seconds:.1f}", f"{r.memory / MIB:.0f}", explained)


def table_row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("`", "'") for cell in cells) + " |"


def versions(entries: list[Entry], limits: Limits) -> dict[str, str]:
    """Of torch, of every package that the entries need, and the commits of the checkouts."""
    named = packages_distributions()
    wanted = ["torch", "transformers", *dict.fromkeys(e.package for e in entries if e.package)]
    by_distribution = {}
    for name in wanted:
        with contextlib.suppress(PackageNotFoundError):
            distribution = named.get(name, [name])[0]
            by_distribution[distribution] = version(distribution).split("+")[0]
    return by_distribution | commits(entries, limits)


def commits(entries: list[Entry], limits: Limits) -> dict[str, str]:
    by_name = {}
    for name in dict.fromkeys(e.checkout for e in entries if e.checkout):
        folder = limits.checkouts and limits.checkouts / name
        if folder and (folder / ".git").exists():
            line = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
            by_name[name] = subprocess.run(line, capture_output=True, text=True).stdout.strip()
    return by_name


def matching(entries: list[Entry], pattern: str) -> list[Entry]:
    """Those whose name contains the pattern, or matches it."""
    return [e for e in entries if pattern in e.name or fnmatch.fnmatchcase(e.name, pattern)]


def main(
    only: Annotated[str, typer.Option(help="Only modules whose name contains this or matches it (timm/vit*).")] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the modules and what they lack, and stop.")] = False,
    resume: Annotated[bool, typer.Option(help="Keep the rows of the record.")] = False,
    seconds: Annotated[float, typer.Option(help="Time limit per audit, in CPU seconds.")] = 150,
    memory: Annotated[float, typer.Option(help="Memory limit per process, in GiB.")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="Number of modules at a time.")] = 2,
    site: Annotated[list[Path], typer.Option(help="A folder of packages. May be given several times.")] = [],  # noqa: B006
    checkouts: Annotated[Path | None, typer.Option(help="A folder of repositories.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Write every row here.")] = RESULTS,
    page: record.PageOption = PAGE,
    recorded: record.ReadOption = None,
    corpus_name: Annotated[str, typer.Option("--corpus", help="An importable module with ENTRIES.")] = "corpus",
) -> None:
    """Audit the corpus and write the record and the page."""
    warnings.filterwarnings("ignore")
    sys.path.extend(str(folder) for folder in site)
    limits = Limits(seconds, int(memory * GIB), tuple(site), checkouts, corpus_name)
    entries = entries_of(limits)
    if listed:
        list_entries(matching(entries, only), limits)
    elif recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        record.show_page(markdown([Row(**row) for row in recorded_rows], setting), page)
    else:
        measure(entries, only, limits, jobs, json_file, page, resume)


def measure(
    entries: list[Entry], only: str, limits: Limits, jobs: int, file: Path, page: Path | None, resume: bool
) -> None:
    """Run what is asked for; the record is written after every module."""
    setting: JsonObject = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": limits.seconds,
        "memory": limits.memory / GIB,
        "cores": os.cpu_count(),
        "corpus": len(entries),
        "versions": versions(entries, limits),
    }
    keep = [Row(**row) for row in record.read_rows(file)[1]] if resume and file.exists() else []

    def save(rows: list[Row]) -> None:
        record.write_rows(file, setting, [asdict(row) for row in ordered(rows, entries)])

    rows = run(matching(entries, only), limits, jobs, keep, save)
    record.show_page(markdown(ordered(rows, entries), setting), page)


def list_entries(entries: list[Entry], limits: Limits) -> None:
    for entry in entries:
        missing = lacks(entry, limits)
        typer.echo(entry.name + (f"  (skipped: {missing})" if missing else ""))
    typer.echo(f"{len(entries)} modules")


if __name__ == "__main__":
    typer.run(main)
