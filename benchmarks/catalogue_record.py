"""The record of the catalogue: one entry for each type. Strings that repeat (steps of proofs) are stored once.

It is JSON, compressed: 14 kB a type without, less than 1 kB with.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_STEP = re.compile(r"(?P<place>[^:]*: )(?P<theorem>.*)", re.S)
Row = dict[str, Any]


@dataclass(frozen=True)
class TypeEntry:
    """One model type of one kind."""

    kind: str
    type: str
    status: str  # as in coverage_report.WORDS
    reason: str = ""
    form: str = ""  # of its default config
    class_name: str = ""
    seconds: float = 0.0
    parameters: int = 0  # of this form
    rows: tuple[Row, ...] = ()  # findings, by law and pattern of names, each with one proof
    biases: tuple[Row, ...] = ()
    unknown: tuple[Row, ...] = ()
    claims: tuple[tuple[str, int], ...] = ()  # law and number of claims, where only the coverage benchmark ran
    code: str = ""  # the commit that was run; nothing for the first entries, which do not say it

    @classmethod
    def from_row(cls, row: Row) -> TypeEntry:
        known = {f.name for f in fields(cls)}
        lists = {k: tuple(v) for k, v in row.items() if k in ("rows", "biases", "unknown")}
        return cls(**{k: v for k, v in row.items() if k in known} | lists)

    @property
    def redundant(self) -> int:
        return sum(row["dof"] for row in self.rows)

    @property
    def page(self) -> str:
        return f"types/{self.kind}-{self.type}.html"

    def dof(self, code: str) -> int:
        return sum(row["dof"] for row in self.rows if row["code"] == code)


@dataclass(frozen=True)
class Record:
    """All entries, and the versions they were made with."""

    versions: dict[str, str]
    entries: tuple[TypeEntry, ...] = ()

    @classmethod
    def load(cls, file: Path) -> Record:
        """The record; empty if there is no file yet."""
        if not file.is_file():
            return cls({})
        data = json.loads(gzip.decompress(file.read_bytes()))
        words = data["words"]
        unpacked = [
            change_proofs(row, lambda steps: ["".join(words[i] for i in s) for s in steps]) for row in data["types"]
        ]
        return cls(data["versions"], tuple(TypeEntry.from_row(row) for row in unpacked))

    def save(self, file: Path) -> None:
        """Write the record beside and rename it: a run that is stopped never leaves half of it."""
        places: dict[str, int] = {}

        def pack(steps: list[str]) -> list[list[int]]:
            return [[places.setdefault(part, len(places)) for part in split_step(step)] for step in steps]

        types = [change_proofs(slim_row(entry), pack) for entry in sorted(self.entries, key=lambda e: (e.kind, e.type))]
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in types)
        words = json.dumps(list(places), ensure_ascii=False)
        draft = file.with_suffix(".part")
        text = f'{{"versions": {json.dumps(self.versions)},\n"words": {words},\n"types": [\n{lines}\n]}}\n'
        draft.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same record is the same file
        draft.rename(file)

    def with_entry(self, entry: TypeEntry) -> Record:
        others = tuple(e for e in self.entries if (e.kind, e.type) != (entry.kind, entry.type))
        return replace(self, entries=(*others, entry))

    def for_versions(self, versions: dict[str, str]) -> Record:
        """Itself if it was made with these versions, else an empty one."""
        return self if self.versions == versions else Record(versions)


def slim_row(entry: TypeEntry) -> Row:
    """An entry without its empty fields."""
    values = {f.name: getattr(entry, f.name) for f in fields(entry)}  # asdict copies every row: half of the time
    return {k: v for k, v in values.items() if v not in ("", 0, 0.0, (), [])}


def split_step(step: str) -> tuple[str, ...]:
    """Where a step happens, and the theorem, which many steps share."""
    match = _STEP.fullmatch(step)
    return (match["place"], match["theorem"]) if match else (step,)


def change_proofs(row: Row, change: Callable[[list], list]) -> Row:
    return row | {"rows": [r | {"proof": change(r["proof"])} for r in row["rows"]]} if "rows" in row else row


def with_coverage(record: Record) -> Record:
    """The record, with the types that only the coverage benchmark has run."""
    known = {(e.kind, e.type) for e in record.entries}
    attempts = json.loads((RESULTS / "coverage.json").read_text(encoding="utf-8"))["attempts"]
    more = [
        TypeEntry(a["kind"], a["type"], a["status"], a.get("reason", ""), claims=tuple((a.get("claims") or {}).items()))
        for a in attempts
        if (a["kind"], a["type"]) not in known
    ]
    return replace(record, entries=tuple(sorted((*record.entries, *more), key=lambda e: (e.type, e.kind))))


def accounts() -> dict[str, Row]:
    """What the account of a causal type counted, by type."""
    rows = json.loads((RESULTS / "accounts.json").read_text(encoding="utf-8"))["rows"]
    return {row["type"]: row for row in rows if not row.get("error")}
