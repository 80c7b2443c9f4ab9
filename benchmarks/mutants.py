"""Which conditions of the prover a test watches over: a mutation run over proof, claims, search, laws and the checker.

python benchmarks/mutants.py --list --file proof/shift_rules/reductions.py
python benchmarks/mutants.py                                  # all of them, on one core
python benchmarks/mutants.py --file search/spaces.py --resume   # one file again; the others keep their verdicts
python benchmarks/mutants.py --read                           # the page, from the record

A mutant is a condition weakened so that the prover would say more (`mutation/operators.py`). It is killed if some test
of tests/proof, claims, search, laws or audit fails with it. Mutants that cannot matter are listed, each with its
reason, in `mutation/equivalent.toml`. Every mutant runs in a fork of a process that has imported and collected
everything; only the tests in which the changed condition has another value than the original are run.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import fnmatch
import platform
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deadweight.report import record

HERE = Path(__file__).resolve()
PROJECT = HERE.parents[1]
SOURCE = PROJECT / "src" / "deadweight"
ROOMS = ("proof", "claims", "search", "laws")
TESTS = ("tests/proof", "tests/claims", "tests/search", "tests/laws", "tests/audit")
RESULTS, PAGE = HERE.parent / "results" / "mutants.json", PROJECT / "docs" / "mutants.md"
EQUIVALENT = HERE.parent / "mutation" / "equivalent.toml"
sys.path.insert(0, str(PROJECT / "src"))

from mutation.operators import Mutant, mutants_of  # noqa: E402
from mutation.page import page  # noqa: E402


@dataclass(frozen=True)
class Row:
    """What became of one mutant."""

    file: str
    function: str
    original: str
    mutated: str
    occurrence: int
    verdict: str  # killed, timeout, equivalent, survived or unreached
    by: str = ""  # the test that killed it
    how: str = ""  # the failure's first line, or why it is equivalent
    tests: int = 0  # tests in which the condition has another value

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.original, self.mutated, self.occurrence


def all_mutants() -> list[Mutant]:
    rooms = [file for room in ROOMS for file in (SOURCE / room).rglob("*.py")]
    files = [*rooms, SOURCE / "audit" / "checker.py"]
    return [mutant for file in sorted(files, reverse=True) for mutant in mutants_of(SOURCE, file)]


def equivalents() -> tuple[dict[tuple[str, str, str, str], str], str]:
    """The list of mutants that cannot matter, and why; and who has read the reasons."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    reasons = {(m["file"], m["function"], m["original"], m["mutated"]): m["reason"] for m in listed["mutant"]}
    return reasons, listed["note"]


def known_rows(file: Path) -> dict[tuple, Row]:
    if not file.exists():
        return {}
    return {row.key: row for row in (Row(**r) for r in record.read_rows(file)[1])}


def setting(tests: list[str], budget: float) -> dict[str, Any]:
    import torch

    return {"tests": tests, "seconds": budget, "python": platform.python_version(), "torch": torch.__version__}


def run(
    file: Annotated[str, typer.Option(help="Only the source files that match, from src/deadweight on.")] = "*",
    resume: Annotated[bool, typer.Option(help="Leave out the mutants that the record has killed.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print the mutants and stop.")] = False,
    read: Annotated[bool, typer.Option(help="Write the page from the record and stop.")] = False,
    tests: Annotated[str, typer.Option(help="Tests to run instead, separated by blanks.")] = " ".join(TESTS),
    budget: Annotated[float, typer.Option(help="CPU seconds of tests per mutant.")] = 60.0,
    results: Annotated[Path, typer.Option(help="The record.")] = RESULTS,
    markdown: Annotated[Path, typer.Option(help="The page.")] = PAGE,
) -> None:
    mutants, known, (reasons, note) = all_mutants(), known_rows(results), equivalents()
    chosen = [m for m in mutants if fnmatch.fnmatch(m.file, file)]
    if listing:
        for m in chosen:
            print(f"{m.file} {m.function}: {m.original} → {m.mutated}")
        return
    facts = record.read_rows(results)[0] if read else setting(tests.split(), budget)
    facts = facts | {"note": note}
    if not read:
        if resume:
            chosen = [m for m in chosen if m.key not in known or known[m.key].verdict not in ("killed", "timeout")]
        chosen = [m for m in chosen if m.key[:4] not in reasons]
        keep = lambda: record.write_rows(results, facts, [known[m.key] for m in mutants if m.key in known])  # noqa: E731
        attack(chosen, known, keep, tests.split(), budget)
    rows = [judged(m, known, reasons) for m in mutants]
    record.write_rows(results, facts, rows)
    record.show_page(page([asdict(r) for r in rows], facts), markdown)


def judged(mutant: Mutant, known: dict[tuple, Row], reasons: dict[tuple[str, str, str, str], str]) -> Row:
    row = known.get(mutant.key) or Row(*mutant.key, "not run")
    if mutant.key[:4] in reasons and row.verdict not in ("killed", "timeout"):
        return Row(*mutant.key, "equivalent", how=reasons[mutant.key[:4]])
    return row


def attack(
    chosen: list[Mutant], known: dict[tuple, Row], keep: Callable[[], None], tests: list[str], budget: float
) -> None:
    """Run the tests against these mutants; `known` gets their verdicts, and is kept now and then."""
    import pytest
    import torch
    from mutation.session import Session, Verdict

    import deadweight.audit.run
    import deadweight.laws.catalogue  # noqa: F401

    torch.set_num_threads(1)
    sources = {m.file: (SOURCE / m.file).read_text(encoding="utf-8") for m in chosen}
    killers = [known[m.key].by if m.key in known else "" for m in chosen]  # in the record: they are tried first
    done = 0

    def tell(mutant: Mutant, verdict: Verdict) -> None:
        nonlocal done
        done += 1
        known[mutant.key] = Row(*mutant.key, verdict.verdict, verdict.by, verdict.how, verdict.tests)
        said = f"{done}/{len(chosen)} {verdict.verdict} {verdict.seconds}s {mutant.file} {mutant.function}"
        print(f"{said}: {mutant.original} → {mutant.mutated} {verdict.by}", file=sys.stderr, flush=True)
        if done % 50 == 0:
            keep()

    os.chdir(PROJECT)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-W", "ignore"]
    pytest.main([*options, *tests], plugins=[Session(sources, chosen, killers, tell, budget)])


if __name__ == "__main__":
    typer.run(run)
