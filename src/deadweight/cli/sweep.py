"""`deadweight sweep`: a grid of variants and seeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deadweight.cli.progress_and_output import counting_bar, plain
from deadweight.cli.quiet import is_quiet
from deadweight.errors import DeadweightError
from deadweight.report.audit_json import as_text
from deadweight.report.audit_terminal import make_console

if TYPE_CHECKING:
    from deadweight.train.sweep import RunResult

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="TOML file: the settings of a run, and what varies.")
]
OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder to write. Runs that are finished there are kept.")
]
WorkersOption = Annotated[
    int, typer.Option("--workers", min=1, help="Number of runs at the same time on this machine.")
]
RayOption = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Address of a Ray cluster (OUT must be on a shared disk), or local."),
]


def sweep(
    file: FileArgument,
    out: OutArgument,
    workers: WorkersOption = 1,
    ray: RayOption = None,
) -> None:
    """Train every variant with every seed; OUT gets results.json, results.md and results.svg.

    \b
    seeds = [0, 1, 2]
    [model]
    d_model = 128
    [train]
    steps = 300
    [grid]                                    # every combination of these values
    "train.weight_decay" = [0.1, 0.03]
    [[variant]]                               # each variant on its own
    name = "full"
    [[variant]]
    name = "identity Q"
    "model.query" = "identity"

    \b
    deadweight sweep grid.toml OUT
    deadweight sweep grid.toml OUT --ray auto

    \b
    exit status: 0 done (the table counts runs that failed), 2 wrong usage or bad input
    """
    from deadweight.train.grid import read_sweep

    runs = read_sweep(file)
    from deadweight.train.sweep import sweep as run_sweep  # imports torch: mistakes are reported before

    with counting_bar(make_console(stderr=True)) as bar:
        task = bar.add_task("training", total=len(runs))

        def tell(result: RunResult) -> None:
            bar.advance(task)
            words = f"{result.bits_per_byte:.4f} bits per byte" if result.error is None else result.error
            if not is_quiet():
                bar.console.print(f"{result.variant}, seed {result.seed}: {words}", markup=False, highlight=False)

        results = run_sweep(runs, out, workers=workers, ray=ray, tell=tell)
    write_results(results, out)


def write_results(results: list[RunResult], out: Path) -> None:
    """The table on the terminal, and the results in OUT."""
    from deadweight.report.sweep import markdown, plot, print_sweep
    from deadweight.train.sweep import summarise

    table = summarise(results)
    (out / "results.json").write_text(as_text({"runs": [asdict(r) for r in results]}), encoding="utf-8")
    (out / "results.md").write_text(markdown(table), encoding="utf-8")
    print_sweep(table, make_console())
    try:
        plot(table, out / "results.svg")
    except DeadweightError as error:  # the results are there; only the figure is missing
        plain(str(error), stderr=True)
