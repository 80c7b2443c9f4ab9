"""A baseline: the findings that a project has today, in a file. New ones fail a check, and so do those now gone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deadweight.audit.result import Finding, Pieces
from deadweight.errors import DeadweightError

FORMAT = 1
TEXTS = ("model", "code", "parameter", "verdict")  # fields of an entry that are text


@dataclass(frozen=True, order=True)
class Entry:
    """A finding as it is listed: which law, about which part of which parameter of which model, and how many dof."""

    model: str
    code: str
    parameter: str
    verdict: str
    dof: int
    slice: Pieces = ()  # empty: the whole parameter


def entry_of(model: str, finding: Finding) -> Entry:
    return Entry(model, finding.code, finding.parameter, finding.verdict, finding.dof, finding.slice or ())


def read_baseline(file: Path) -> frozenset[Entry]:
    """The entries of a file; raises with the way to make one if it cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}")
        return frozenset(read_entry(item) for item in data["findings"])
    except FileNotFoundError as error:
        raise DeadweightError(f"the baseline {file} does not exist; --update-baseline writes it") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeadweightError(
            f"the baseline {file} cannot be read ({type(error).__name__}: {error}); expected a file that "
            "--update-baseline wrote"
        ) from error


def read_entry(item: dict[str, Any]) -> Entry:
    """An entry of the file; raises ValueError or TypeError if it is not one that was written."""
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in TEXTS):
        raise ValueError(f"an entry is {item!r}"[:200])
    pieces = tuple((int(start), int(stop)) for start, stop in item.get("slice", ()))
    return Entry(**(item | {"dof": int(item["dof"]), "slice": pieces}))


def write_baseline(file: Path, entries: Iterable[Entry]) -> None:
    """One line for every entry, sorted, so that a change is a change of few lines."""
    rows = [json.dumps(entry_data(entry)) for entry in sorted(set(entries))]
    body = ",\n  ".join(rows)
    try:
        file.write_text(f'{{"format": {FORMAT}, "findings": [\n  {body}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise DeadweightError(
            f"the baseline {file} cannot be written ({error}); expected a file in a folder"
        ) from error


def entry_data(entry: Entry) -> dict[str, Any]:
    data = asdict(entry)
    return data if entry.slice else {key: value for key, value in data.items() if key != "slice"}
