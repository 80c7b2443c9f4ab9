"""A sweep as a table and a picture, with mean and spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deadweight.report.figure import pyplot, save
from deadweight.train.sweep import VariantSummary


def print_sweep(summaries: Sequence[VariantSummary], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("variant")
    table.add_column("parameters", justify="right")
    table.add_column("bits per byte", justify="right")
    table.add_column("runs", justify="right")
    for row in summaries:
        size = "" if row.parameters is None else f"{row.parameters:,}"
        runs = f"{len(row.values)}" + (f", {row.failed} failed" if row.failed else "")
        table.add_row(row.variant, size, row.words, runs)
    console.print(table)


def markdown(table: Sequence[VariantSummary]) -> str:
    lines = ["| variant | parameters | bits per byte | runs | failed |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {r.variant} | {'' if r.parameters is None else f'{r.parameters:,}'} | {r.words} | {len(r.values)} | "
        f"{r.failed or ''} |"
        for r in table
    ]
    return "\n".join(lines) + "\n"


def plot(table: Sequence[VariantSummary], file: Path) -> None:
    """Mean, standard deviation and every seed."""
    shown = [r for r in table if r.values]
    figure, axes = pyplot().subplots(figsize=(7.5, 1.2 + 0.4 * len(shown)), layout="constrained")
    for place, row in enumerate(shown):
        axes.errorbar(row.mean, -place, xerr=row.spread, fmt="s", color="black", capsize=4, markersize=5)
        axes.scatter(row.values, [-place] * len(row.values), s=14, alpha=0.6, zorder=3)
    axes.set_yticks([-i for i in range(len(shown))], [r.variant for r in shown])
    axes.set_xlabel("bits per byte: mean ± standard deviation, and every seed")
    axes.grid(axis="x", alpha=0.3)
    save(figure, file)
