"""The record of the coverage benchmark, and the page that is made of it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from catalogue_record import RESULTS, Record
from coverage_words import WORDS, plain
from rich.console import Console

from deadweight.report.record import load_record

COUNTED = re.compile(r"unexplained: \d+ of \d+ elements have no gradient in a narrow clone")
UNTOLD = "unexplained: no gradient in a narrow clone, searched before reasons were told"
CATALOGUE = RESULTS / "catalogue.json.gz"


@dataclass(frozen=True)
class Attempt:
    """What became of one type."""

    kind: str
    type: str
    status: str  # one of WORDS
    reason: str
    seconds: float
    form: str = ""
    nodes: int = 0
    claims: dict[str, int] | None = None  # law code to the number of claims
    unexplained: dict[str, str] | None = None  # parameter to what is not explained of it; None: not examined
    code: str = ""  # the commit that was run


def grouped(attempts: list[Attempt]) -> dict[tuple[str, str], list[str]]:
    """(status, reason) to the types, without those that were searched with success; the largest groups first."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for a in attempts:
        if a.status not in ("proofs", "clean"):
            groups[a.status, plain(a.reason)].append(a.type)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def report(attempts: list[Attempt], console: Console) -> None:
    """Counts by kind, then what has no proofs, grouped by the reason."""
    for kind in dict.fromkeys(a.kind for a in attempts):
        mine = [a for a in attempts if a.kind == kind]
        counts = Counter(a.status for a in mine)
        said = ", ".join(f"{n} {WORDS[status]}" for status, n in counts.most_common())
        console.print(f"{kind}: {len(mine)} types: {said}", markup=False, highlight=False)
        for (status, why), types in grouped(mine).items():
            console.print(f"  {len(types):3} {', '.join(types)}\n      {status}: {why}", markup=False, highlight=False)


def markdown(attempts: list[Attempt], setting: dict[str, Any]) -> str:
    """The recorded attempts as a page."""
    kinds = list(dict.fromkeys(a.kind for a in attempts))
    lines = [
        "# Coverage: which model types get proofs",
        "",
        "This page says which of the model types that transformers registers get proofs, and why the others do not.",
        "",
        "| kind | types | " + " | ".join(WORDS.values()) + " |",
        "| --- " * (len(WORDS) + 2) + "|",
    ]
    for kind in kinds:
        counts = Counter(a.status for a in attempts if a.kind == kind)
        lines.append(f"| {kind} | {counts.total()} | " + " | ".join(str(counts[s]) for s in WORDS) + " |")
    lines += [
        "",
        f"transformers {setting['transformers']}, torch {setting['torch']}; every type from its default "
        f"config{', narrow' if setting['narrow'] else ''}, with {setting['seconds']} s each. Written by "
        "`benchmarks/coverage.py`, which says what counts.",
        *setting.get("notes", ()),
        *proved_elsewhere(attempts),
    ]
    for kind in kinds:
        mine = [a for a in attempts if a.kind == kind]
        lines += ["", f"## {kind}: number of types in which each law is proved", ""]
        laws = Counter(code for a in mine for code in a.claims or {})
        lines.append(", ".join(f"{code} {n}" for code, n in sorted(laws.items())) + ".")
        lines += ["", *states(mine), *without_gradient(kind, mine)]
        if rest := grouped(mine):
            lines += ["", f"## {kind}: types without proofs", "", "| types | result | reason |", "| --- | --- | --- |"]
            lines += [f"| {', '.join(t)} | {WORDS[s]} | {_cell(why)} |" for (s, why), t in rest.items()]
    return "\n".join(lines) + "\n"


def proved_elsewhere(attempts: list[Attempt]) -> list[str]:
    """Types without proofs here that have some in the catalogue, where the model is searched at its own width first."""
    without = {(a.kind, a.type) for a in attempts if a.status in ("timeout", "nothing", "evidence")}
    entries = [e for e in Record.load(CATALOGUE).entries if (e.kind, e.type) in without and e.status == "proofs"]
    if not entries:
        return []
    names = ", ".join(f"{e.type} ({e.kind})" for e in sorted(entries, key=lambda e: (e.type, e.kind)))
    return ["", f"Without proofs here, but with proofs in the [catalogue](catalogue.md): {names}."]


def states(attempts: list[Attempt]) -> list[str]:
    """Which state of the code the rows are from."""
    counts = Counter(a.code for a in attempts)
    said = [
        f"{n} of {f'commit {code}' if code else 'an earlier state, without evidence'}" for code, n in counts.items()
    ]
    return [f"Rows: {', '.join(said)}."]


LOOKED_INTO = {  # why these parameters have no gradient, found by hand
    "diffusion_gemma": "no logits of an earlier step are given, so the signal of its self-conditioning is zero, and "
    "three maps multiply zeros",
    "funnel": "no token types are given, so all tokens are in one segment, their bias is the same for all keys, "
    "and softmax ignores it; after pooling, the last block has one key left",
    "maskformer": "its decoder starts at zeros, so that every value of its first self-attention is the same bias; in "
    "the clone a picture is one position, so that every query gets the same answer there: all queries stay alike, and "
    "what tells them apart changes nothing",
    "mra": "without its CUDA kernel, transformers returns zeros in place of attention, so queries are not read and the "
    "output weight multiplies zeros",
    "nystromformer": "its convolution along the sequence has 65 taps; on 5 tokens all but 9 of them see only padding",
}


def without_gradient(kind: str, attempts: list[Attempt]) -> list[str]:
    """Parameters without a gradient that no claim explains, by the reason; and claims that the numbers contradict."""
    seen = [a for a in attempts if a.unexplained is not None]
    by_reason: dict[str, dict[str, int]] = defaultdict(dict)
    for a in seen:
        for reason in (a.unexplained or {}).values():
            reason = COUNTED.sub(
                "unexplained: no gradient in a narrow clone, searched before reasons were told", reason
            )
            by_reason[reason][a.type] = by_reason[reason].get(a.type, 0) + 1
    lines = ["", f"## {kind}: parameters without gradient and without proof", ""]
    clean = sum(not a.unexplained for a in seen)
    lines.append(
        f"{len(seen)} types were examined by evidence; in {clean} every parameter without gradient is explained."
    )
    if by_reason:
        lines += ["", "| types (parameters) | why nothing is claimed |", "| --- | --- |"]
        ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
        lines += [f"| {', '.join(f'{t} ({n})' for t, n in types.items())} | {_cell(why)} |" for why, types in ordered]
    known = {t: why for t, why in LOOKED_INTO.items() if any(t in types for types in by_reason.values())}
    return lines + ([""] if known else []) + [f"- {t}: {why}." for t, why in known.items()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def read(file: Path) -> tuple[dict[str, Any], list[Attempt]]:
    recorded = load_record(file)
    return recorded["setting"], [Attempt(**({"reason": "", "seconds": 0.0} | a)) for a in recorded["attempts"]]


def write(file: Path, setting: dict[str, Any], attempts: list[Attempt]) -> None:
    rows = ",\n".join("  " + json.dumps({k: v for k, v in asdict(a).items() if v or v == {}}) for a in attempts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"setting": {json.dumps(setting)},\n "attempts": [\n{rows}\n]}}\n', encoding="utf-8")
