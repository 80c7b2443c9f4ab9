"""The page about what the redundancy of public checkpoints costs; the same rows on the pages of the catalogue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "costs.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one checkpoint could do without."""

    row: Row

    def total(self, what: str, *verdicts: str) -> int:
        """Of these verdicts, or of all of them, together."""
        laws = self.row["laws"]
        return sum(law[what] for law in laws if not verdicts or law["verdict"] in verdicts)

    @property
    def share(self) -> float:
        return self.total("parameters") / float(self.row["parameters"])

    @property
    def largest(self) -> Row:
        """The law that the most numbers are due to."""
        law: Row = max(self.row["laws"], key=lambda law: law["parameters"])
        return law


def recorded_costs(file: Path = RECORD) -> list[Cost]:
    """The checkpoints of the record that were audited."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    return [Cost(row) for row in rows if "error" not in row]


def in_words(n: int) -> str:
    """A large number with three digits."""
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if n >= 10**power:
            return f"{n / 10**power:.3g} {unit}"
    return str(n)


def percent(share: float) -> str:
    """Two decimals, or two digits of what is smaller than a tenth of a percent."""
    return f"{100 * share:.2f} %" if share >= 0.001 else f"{100 * share:.2g} %"


def costs_page(record: Row) -> str:
    costs = [Cost(row) for row in record["rows"] if "error" not in row]
    failed = [row for row in record["rows"] if "error" in row]
    low, high = min(costs, key=lambda c: c.share), max(costs, key=lambda c: c.share)
    versions = record["versions"]
    lines = [
        "# What this costs: redundancy in public checkpoints",
        "",
        "This page says how many parameters, bytes and FLOPs per token of well-known checkpoints are redundant because "
        "of their architecture alone.",
        "",
        f"**Between {percent(low.share)} ({low.row['name']}) and {percent(high.share)} ({high.row['name']}) of the "
        f"parameters of {len(costs)} checkpoints can be removed without changing the function.** What a designer could "
        f"have left out, because it is dead or folds into a neighbour, is {largest_avoidable(costs)}. The rest is free "
        "choice of basis: `deadweight reduce` stores an identity block for each head. "
        f"{by_positions(costs)}",
        "",
        "Each checkpoint's config is built on the meta device at its full size and audited, as "
        "`deadweight audit config.json` does it; nothing is downloaded. The configs are in "
        "[checkpoints.json](../benchmarks/checkpoints.json): the sizes of the config.json that the hub id names, "
        "entered by hand. A test compares the parameter count of each audited model with the published one, where it "
        "is known.",
        "",
        "| checkpoint | parameters | dead or folds | `reduce` removes at most | bytes | FLOPs per token | most by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(table_row(cost) for cost in costs),
        "",
        "*dead or folds*: numbers that a new model of this architecture can leave out. *`reduce` removes at most*: "
        "these, and the numbers that a choice of basis makes constant. Bytes in the precision of the checkpoint. A "
        "number of a matrix counts as two FLOPs, of a vector as one; numbers of an expert count for every token, "
        "whether it is chosen or not. Gauges that no rewrite carries out (the basis of the residual stream, scales of "
        "hidden units, rotary pairs) are not counted here; [the catalogue](catalogue.md) has them, with all proofs.",
        "",
        *(f"Not audited: {row['name']} ({row['error']})." for row in failed),
        *([""] if failed else []),
        f"transformers {versions['transformers']}, torch {versions['torch'].split('+')[0]}, deadweight "
        f"{versions['deadweight']}. All audits together took {sum(c.row['seconds'] for c in costs):.0f} s of processor "
        "time. Written by `benchmarks/costs.py`.",
    ]
    return "\n".join(lines) + "\n"


def by_positions(costs: list[Cost]) -> str:
    """How much it is where queries and keys may change their basis, and where rotary positions forbid it."""
    free = [c.share for c in costs if any(law["code"] == "DW009" and law["parameters"] for law in c.row["laws"])]
    bound = [c.share for c in costs if c.share not in free]
    return (
        f"Where queries and keys may change their basis too (no rotary positions, or not in all dimensions), it is "
        f"{percent(min(free))} to {percent(max(free))}, elsewhere at most {percent(max(bound))}."
    )


def largest_avoidable(costs: list[Cost]) -> str:
    most = max(costs, key=lambda c: c.total("parameters", "dead", "folds") / c.row["parameters"])
    share = most.total("parameters", "dead", "folds") / most.row["parameters"]
    return f"at most {percent(share)} ({most.row['name']})"


def table_row(cost: Cost) -> str:
    row, largest = cost.row, cost.largest
    return (
        f"| {row['name']} | {row['parameters']:,} | {cost.total('parameters', 'dead', 'folds'):,} | "
        f"{cost.total('parameters'):,} ({percent(cost.share)}) | {in_words(cost.total('bytes'))}B | "
        f"{in_words(cost.total('flops'))} | {largest['code']} {largest['law']} |"
    )
