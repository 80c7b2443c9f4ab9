"""The findings as the rows of the page, with their proofs, packed so that 20,000 of them stay below a megabyte.

Repeated blocks have the same proof but for the number of the block. Proofs are stored once, with a mark in the place
of that number, and texts once each; the rest is left to deflate. What still does not fit is left out, and counted.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from deadweight.audit.result import Audit, Finding, Visit
from deadweight.report.audit_rows import Group
from deadweight.report.html.page import LONGEST_TEXT, safe
from deadweight.report.html.remedy import Remedy, remedy_of
from deadweight.report.name_pattern import pieces_text, split
from deadweight.report.text import one_line

OWN, NEXT = "\x00", "\x01"  # stand for the number of the finding's block, and of the one after it
MOST_INTO = 40  # patterns of partner parameters listed for a row
BUDGET = 600_000  # characters of packed findings: with 20 laws and the drawing a page stays below 1 MB
NO_PROOF = -1
BLOCK = re.compile(r"(?<=\.)\d+(?=[.,])")  # the number of a block in a name, or in a module before its line of code
Walk = tuple[tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Row:
    """A row of the table: one law and one pattern of parameters."""

    code: str
    law: str
    verdict: str
    tier: str
    note: str
    where: str
    dof: int
    n: int  # findings
    into: tuple[str, ...]
    remedy: Remedy
    first: str  # the address of its first finding


@dataclass(frozen=True)
class DetailLevel:
    """How much is kept: findings with a proof, findings listed one by one, rows."""

    proofs: int
    findings: int
    rows: int


LEVELS = tuple(DetailLevel(*(n or 10**9 for n in numbers)) for numbers in (
    (0, 0, 0), (4000, 0, 0), (1000, 0, 0), (200, 20_000, 0), (50, 5000, 20_000), (20, 1000, 5000), (5, 200, 1000),
))  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """The data of the page, and what was left out of it."""

    text: str  # base64 of deflated JSON
    rows: tuple[Row, ...]
    without_proof: int
    not_listed: int


@dataclass
class Strings:
    """Every text once."""

    place: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> int:
        return self.place.setdefault(text, len(self.place))


def pack_findings(groups: Sequence[Group], audit: Audit, budget: int = BUDGET) -> Packed:
    """As many rows, findings and proofs as fit into `budget` characters."""
    total = sum(len(g.findings) for g in groups)
    rows = tuple(make_row(g, audit) for g in groups)
    for level in LEVELS:
        data, proofs, listed = build_data(groups[: level.rows], rows[: level.rows], level)
        text = deflate(data)
        if len(text) <= budget:
            break
    return Packed(text, rows[: level.rows], listed - proofs, total - listed)


def deflate(data: object) -> str:
    raw = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return b64encode(zlib.compress(raw, 9)).decode()


def make_row(g: Group, audit: Audit) -> Row:
    into = tuple(safe(str(p)) for p in g.into[:MOST_INTO])
    more = len(g.into) - len(into)
    return Row(
        code=g.code,
        law=safe(g.law),
        verdict=g.verdict,
        tier=g.tier,
        note=one_line(g.note),
        where=safe(g.where),
        dof=g.dof,
        n=len(g.findings),
        into=(*into, f"and {more:,} more") if more else into,
        remedy=remedy_of(g, audit),
        first=address(g.findings[0]),
    )


def build_data(groups: Sequence[Group], rows: Sequence[Row], level: DetailLevel) -> tuple[object, int, int]:
    """The data of the page, how many proofs it holds, and how many findings."""
    strings, walks, with_proof, listed = Strings(), dict[Walk, int](), 0, 0
    proved = set(map(id, first_of_each_row(groups, level.proofs)))
    seen = Counter[str]()
    packed = []
    for g, row in zip(groups, rows, strict=True):
        kept = g.findings[: max(1, level.findings - listed)]
        numbers = [walks.setdefault(pack_walk(f, strings), len(walks)) if id(f) in proved else NO_PROOF for f in kept]
        addresses = [number_repeated(address(f), seen) for f in kept]
        members = [pack_finding(*finding) for finding in zip(kept, numbers, addresses, strict=True)]
        packed.append({**vars(row), "remedy": vars(row.remedy), "findings": members})
        listed += len(kept)
        with_proof += sum(n >= 0 for n in numbers)
    return {"strings": list(strings.place), "walks": list(walks), "rows": packed}, with_proof, listed


def first_of_each_row(groups: Sequence[Group], most: int) -> Iterator[Finding]:
    """Findings that keep their proof: the first of every row, then the others, up to `most`."""
    firsts = [g.findings[0] for g in groups]
    others = (f for g in groups for f in g.findings[1:])
    for n, f in enumerate((*firsts, *others)):
        if n >= most:
            return
        yield f


def pack_finding(f: Finding, walk: int, address: str) -> list[object]:
    evidence = f"{f.evidence:.1e}" if f.evidence is not None and math.isfinite(f.evidence) else ""
    place = safe(f.parameter) + pieces_text(f.slice)
    line = "" if f.source is None else safe(f"{f.source.role} at {f.source}")
    return [place, f.dof, f.elements, evidence, f.unreplayed, block_number(f), walk, address, line]


def address(f: Finding) -> str:
    """By which a link names a finding, whatever else the audit finds."""
    pieces = "" if f.slice is None else "[" + ",".join(f"{a}:{b}" for a, b in f.slice[:8]) + "]"
    return f"{f.code}:{safe(f.parameter)}{pieces}"


def number_repeated(address: str, seen: Counter[str]) -> str:
    """The address, with its number if another finding has it already: DW002:h.0.bias~2."""
    seen[address] += 1
    return address if seen[address] == 1 else f"{address}~{seen[address]}"


def block_number(f: Finding) -> int:
    """Of the outermost repeated block that holds the parameter; −1 outside."""
    _, numbers, _ = split(f.parameter)
    return numbers[0] if numbers else -1


def pack_walk(f: Finding, strings: Strings) -> Walk:
    """The steps as numbers of texts. A proof without a graph is a chain of its lines."""
    visits = f.walk or tuple(chain_of(f.proof))
    number = block_number(f)

    def add(text: str) -> int:
        return strings.add(mark_block(safe_line(text), number))

    return tuple(
        (add(v.op), add(v.node), add(v.rule), add(v.conclusion), v.reads, tuple(add(p) for p in v.parameters))
        for v in visits
    )


def chain_of(proof: tuple[str, ...]) -> Iterator[Visit]:
    for i, line in enumerate(proof):
        yield Visit("", "", line, "", (i - 1,) if i else ())


@lru_cache(1 << 16)
def safe_line(text: str) -> str:
    return safe(one_line(text), LONGEST_TEXT)


def mark_block(text: str, number: int) -> str:
    """The same text with marks for the number of the block and for the next one."""
    if number < 0:
        return text
    marks = {str(number): OWN, str(number + 1): NEXT}
    return BLOCK.sub(lambda found: marks.get(found[0], found[0]), text)
