"""`deadweight sweep`: a grid of variants and seeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deadweight.cli.screen import counting_bar
from deadweight.report.json_report import as_text
from deadweight.report.terminal import make_console

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="TOML: a run, and what varies.")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; what is there already is kept.")]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Runs at a time on this machine.")]
RayOption = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster (OUT on a shared disk), or local.")
]


def sweep(
    file: FileArgument,
    out: OutArgument,
    workers: WorkersOption = 1,
    ray: RayOption = None,
) -> None:
    """Train a grid of variants and seeds; OUT gets results.json, results.md and results.svg.

    \b
    seeds = [0, 1, 2]
    [model]
    d_model = 128
    [train]
    steps = 300
    [grid]                                    # every combination
    "train.weight_decay" = [0.1, 0.03]
    [[variant]]                               # beside each other
    name = "full"
    [[variant]]
    name = "identity Q"
    "model.query" = "identity"

    \b
    deadweight sweep grid.toml OUT
    deadweight sweep grid.toml OUT --ray auto

    \b
    exit status: 0 done (runs that failed are in the table), 2 wrong usage or bad input
    """
    from deadweight.report.sweep import markdown, plot, print_sweep
    from deadweight.train.sweep import read_sweep, rows
    from deadweight.train.sweep import sweep as run_sweep

    jobs = read_sweep(file)
    console, bar_console = make_console(), make_console(stderr=True)
    with counting_bar(bar_console) as bar:
        task = bar.add_task("training", total=len(jobs))

        def tell(outcome: Any) -> None:
            bar.advance(task)
            told = f"{outcome.bits_per_byte:.4f} bits per byte" if outcome.error is None else outcome.error
            bar.console.print(f"{outcome.variant}, seed {outcome.seed}: {told}", markup=False, highlight=False)

        outcomes = run_sweep(jobs, out, workers=workers, ray=ray, tell=tell)
    table = rows(outcomes)
    (out / "results.json").write_text(as_text({"runs": [asdict(o) for o in outcomes]}), encoding="utf-8")
    (out / "results.md").write_text(markdown(table), encoding="utf-8")
    print_sweep(table, console)
    plot(table, out / "results.svg")
