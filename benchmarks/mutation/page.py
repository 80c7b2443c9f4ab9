"""The page about the mutation run: the score, file by file, what survived, and what cannot matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
DEAD = ("killed", "timeout")
ALIVE = ("survived", "unreached")

HEAD = """# Mutants: which conditions of the prover are covered by a test

This page says for which conditions of the prover some test fails when the condition is weakened.
"""
METHOD = """A law is only as good as its conditions. Each condition of `proof/`, `claims/`, `search/`, `laws/` and
`audit/checker.py` is weakened, one at a time, so that the prover would claim more: a refusal happens less often,
`a and b` loses an operand, `<` becomes `<=`, `fixed=False` becomes `True`, a `raise` returns. If the branches do not
show which direction is weaker, both are tried. A mutant is *killed* if a test fails with it, *equivalent* if it is on
the list below, and *survives* otherwise.

Repeat it with `python benchmarks/mutants.py` (one core); `--file search/spaces.py --resume` runs one file again.
"""


def page(rows: list[Row], setting: dict[str, Any]) -> str:
    """The whole page, from the record."""
    parts = [HEAD, score(rows), METHOD, taken(setting), by_file(rows), survivors(rows), equivalent(rows)]
    return "\n".join(part for part in parts if part)


def taken(setting: dict[str, Any]) -> str:
    """Which tests were run, and for how long."""
    tests = ", ".join(f"`{test}`" for test in setting["tests"])
    more = f" {setting['note']}" if "note" in setting else ""
    return f"Tests: {tests}, at most {setting['seconds']:g} CPU seconds of them for one mutant.{more}\n"


def score(rows: list[Row]) -> str:
    count = Counter(r["verdict"] for r in rows)
    killed, alive = sum(count[v] for v in DEAD), sum(count[v] for v in ALIVE)
    waiting = f", {count['not run']:,} not run yet" if count["not run"] else ""
    counts = f"{killed:,} killed, {count['equivalent']:,} equivalent, {alive:,} survived"
    said = f"**{len(rows):,} mutants: {counts}{waiting}.** Of the killed mutants {count['timeout']} ran out of time."
    if alive:
        said += (
            f" For {count['unreached']} of the survivors no test reaches the condition with a value that the mutant "
            "changes; the others passed all tests that fit into the time limit of a mutant."
        )
    return said + "\n"


def by_file(rows: list[Row]) -> str:
    lines = ["| file | mutants | killed | equivalent | survived | not run |", "| --- | --- | --- | --- | --- | --- |"]
    for file in dict.fromkeys(r["file"] for r in rows):
        count = Counter(r["verdict"] for r in rows if r["file"] == file)
        killed, alive = sum(count[v] for v in DEAD), sum(count[v] for v in ALIVE)
        lines.append(f"| {file} | {count.total()} | {killed} | {count['equivalent']} | {alive} | {count['not run']} |")
    return "\n".join(lines) + "\n"


def survivors(rows: list[Row]) -> str:
    alive = [r for r in rows if r["verdict"] in ALIVE]
    return listed(
        "## Survivors",
        "Each is a missing test, or a condition that may not be needed. *Time was up*: not all tests were run.",
        alive,
    )


def equivalent(rows: list[Row]) -> str:
    same = [r for r in rows if r["verdict"] == "equivalent"]
    return listed(
        "## Equivalent",
        "None of these can make a false claim; the last column says why.",
        same,
    )


def listed(title: str, words: str, rows: Iterable[Row]) -> str:
    lines = [f"| {r['file']} | `{r['function']}` | {change(r)} | {r['how']} |" for r in rows]
    if not lines:
        return ""
    return (
        "\n".join([title, "", words, "", "| file | function | change | |", "| --- | --- | --- | --- |", *lines]) + "\n"
    )


def change(row: Row) -> str:
    """From what to what, short enough for a table."""
    before, after = (" ".join(row[k].split()).replace("|", "\\|") for k in ("original", "mutated"))
    return f"`{before}` → `{after}`"
