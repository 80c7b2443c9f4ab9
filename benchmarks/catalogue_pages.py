"""The pages of the catalogue: a table of all types, a page for each, and everything as JSON. Plain HTML, no network."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from catalogue_record import Record, Row, TypeEntry, accounts, with_coverage
from costs_report import Cost, in_words, percent, recorded_costs
from coverage_words import WORDS

from deadweight.laws.page import pages as law_pages

TEMPLATES = Path(__file__).parent / "catalogue_templates"
ORDER = ("causal", "masked", "seq2seq", "base")
WEIGHT = {"dead": 0, "folds": 1, "gauge": 2}


def write_pages(record: Record, folder: Path) -> None:
    for name, text in make_pages(record).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def make_pages(record: Record) -> dict[str, str]:
    """Every file of the catalogue, by its path."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    full, counted, costs = with_coverage(record), accounts(), recorded_costs()
    versions = record.versions or {"deadweight": "", "transformers": "", "torch": ""}
    pages = {"index.html": environment.get_template("index.html").render(index_data(full, counted, versions))}
    template = environment.get_template("type.html")
    for entry in full.entries:
        account = counted.get(entry.type) if entry.kind == "causal" else None
        pages[entry.page] = template.render(
            e=entry,
            laws=rows_by_law(entry),
            account=account,
            versions=versions,
            words=WORDS,
            costs=[cost_row(cost) for cost in costs if cost.row["type"] == entry.type],
        )
    data = {"versions": record.versions, "types": [asdict(entry) for entry in full.entries]}
    return pages | {"catalogue.json": json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"}


def summary_page(record: Record) -> str:
    """The page of docs/ about the catalogue: how many types have which law."""
    full = with_coverage(record)
    kinds = list(dict.fromkeys(e.kind for e in sorted(full.entries, key=lambda e: ORDER.index(e.kind))))
    proved = [e for e in full.entries if e.status == "proofs"]
    lines = [
        "# Catalogue: every model type of transformers",
        "",
        "This page says how many model types of transformers have which redundancy, and where the proofs are.",
        "",
        f"**{len(proved)} of {len(full.entries)} types have redundant parameters by proof.** A type counts once for "
        f"each kind ({', '.join(kinds)}) that transformers registers it for. transformers "
        f"{record.versions['transformers']}, torch {record.versions['torch']}. Proofs, biases and dimensions are "
        f"{recorded(record, len(full.entries))}",
        "",
        processor_time(record),
        "",
        "The catalogue itself is part of the site (`catalogue/index.html`): search, sort and filter, a page for each "
        "type with the proof of every cell, and everything as JSON. Without the site:",
        "",
        "```",
        "python benchmarks/catalogue.py --read --pages build/catalogue",
        "```",
        "",
        "| law | " + " | ".join(kinds) + " |",
        "| --- " * (len(kinds) + 1) + "|",
    ]
    for page in law_pages():
        counts = Counter(e.kind for e in proved if page.code in law_codes(e))
        lines.append(f"| {page.code} {page.law} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    lines += [
        "",
        "Number of types for which the law holds somewhere. DW016 is about probabilities; here logits are the output. "
        "Written by `benchmarks/catalogue.py`.",
    ]
    return "\n".join(lines) + "\n"


def recorded(record: Record, n_types: int) -> str:
    """For how many types there are proofs, and what stands in for the others."""
    if len(record.entries) >= n_types:
        return "recorded for all of them."
    others = "for the others the record of the coverage benchmark says which laws hold."
    return f"recorded for {len(record.entries)} of them so far; {others}"


def processor_time(record: Record) -> str:
    """How long all entries took together, and which commits they are of."""
    minutes = sum(entry.seconds for entry in record.entries) / 60
    states = Counter(entry.code for entry in record.entries)
    said = [
        f"{n} of {f'commit {code}' if code else 'earlier commits that they do not name'}" for code, n in states.items()
    ]
    return (
        f"The {len(record.entries)} entries together took {minutes:.0f} minutes of processor time, which is half as "
        f"many on two cores ({minutes / 2:.0f}). Entries: {', '.join(said)}."
    )


def law_codes(entry: TypeEntry) -> set[str]:
    """The laws that hold somewhere in a type."""
    return {row["code"] for row in entry.rows} | {code for code, _ in entry.claims}


def index_data(record: Record, counted: dict[str, Row], versions: dict[str, str]) -> dict[str, Any]:
    return {
        "versions": versions,
        "laws": law_pages(),
        "kinds": sorted({e.kind for e in record.entries}),
        "statuses": sorted({e.status for e in record.entries}),
        "older": sum(bool(e.claims) for e in record.entries),
        "entries": [index_row(e, counted.get(e.type) if e.kind == "causal" else None) for e in record.entries],
    }


def index_row(entry: TypeEntry, account: Row | None) -> dict[str, Any]:
    """A row of the table."""
    share = entry.redundant / entry.parameters if entry.parameters else 0.0
    return {
        "type": entry.type,
        "kind": entry.kind,
        "status": entry.status,
        "page": entry.page,
        "parameters": entry.parameters or "",
        "parameters_text": f"{entry.parameters:,}" if entry.parameters else "",
        "share": f"{share:.6f}" if entry.parameters else "",
        "share_text": f"{share:.2%}" if entry.parameters else "",
        "biases_text": ", ".join(f"{n} {verdict}" for verdict, n in bias_counts(entry).items()),
        "account": f"{account['explained']} of {account['measured']}" if account else "",
        "codes": sorted(law_codes(entry)),
        "words": search_words(entry),
        "cells": [cell(entry, page.code) for page in law_pages()],
    }


def bias_counts(entry: TypeEntry) -> Counter[str]:
    """How many patterns of biases are dead, fold, are partly redundant, live, unknown."""
    words = {"dead": "dead", "folds": "fold", "live": "live", "unknown": "unknown"}
    return Counter(words.get(bias["verdict"], "partly") for bias in entry.biases)


def search_words(entry: TypeEntry) -> str:
    """What the search looks at."""
    words = [entry.type, entry.kind, entry.status, entry.class_name, entry.reason]
    words += [f"{bias['where']} {bias['verdict']}" for bias in entry.biases]
    words += [f"{u['where']} {u['blocked_by']}" for u in entry.unknown]
    return " ".join(words).lower()


def cell(entry: TypeEntry, code: str) -> dict[str, Any] | None:
    """What a law says about a type: its dof, or the number of claims where no proof is recorded; None: nothing."""
    verdicts = [row["verdict"] for row in entry.rows if row["code"] == code]
    if verdicts:
        dof = entry.dof(code)
        return {"code": code, "verdict": min(verdicts, key=WEIGHT.__getitem__), "value": dof, "text": f"{dof:,}"}
    claims = dict(entry.claims).get(code)
    return {"code": "", "verdict": "", "value": claims, "text": f"×{claims}"} if claims else None


def cost_row(cost: Cost) -> dict[str, str]:
    """What a public checkpoint of a type could do without."""
    return {
        "name": cost.row["name"],
        "hub": cost.row["hub"],
        "parameters": f"{cost.row['parameters']:,}",
        "avoidable": f"{cost.total('parameters', 'dead', 'folds'):,}",
        "removable": f"{cost.total('parameters'):,} ({percent(cost.share)})",
        "bytes": f"{in_words(cost.total('bytes'))}B",
        "flops": in_words(cost.total("flops")),
    }


def rows_by_law(entry: TypeEntry) -> list[tuple[str, list[Row]]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in entry.rows:
        grouped[row["code"]].append(row)
    return sorted(grouped.items())
