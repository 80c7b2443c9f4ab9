"""`deadweight reduce`: remove what is proved redundant, and write a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import deadweight
from deadweight.cli.options import Html, Ignore, Inputs, Json, LayoutName, Overwrite, Select, TrustRemoteCode, joined
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, complain, progress_bar
from deadweight.errors import DeadweightError
from deadweight.laws.page import law_codes

if TYPE_CHECKING:
    from deadweight.reduce.result import Reduction

DIFFERENT = 1


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="As for audit, but with weights.")]
OutArgument = Annotated[
    Path | None, typer.Argument(metavar="OUT", help="The folder to write; not needed with --dry-run.")
]
LayoutOption = Annotated[
    LayoutName,
    typer.Option("--layout", help="slim: smaller tensors. stock: same shapes, loads with plain transformers."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]


def reduce(
    model: ModelArgument,
    out: OutArgument = None,
    layout: LayoutOption = LayoutName.slim,
    dry_run: DryRunOption = False,
    json: Json = None,
    html: Html = None,
    select: Select = None,
    ignore: Ignore = None,
    overwrite: Overwrite = False,
    inputs: Inputs = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Remove what is provably redundant from MODEL, and write the result to OUT.

    The reduced model is compared with the original, in float64 and in its own precision, before OUT appears. Rewrites
    that would make rounding errors more than three times as large are left out, and the report lists them.

    \b
    deadweight reduce demo --dry-run            what would be done, what it saves, and why the rest is not done
    deadweight reduce demo OUT                  smaller tensors; loads with deadweight.load or trust_remote_code
    deadweight reduce demo OUT --layout stock   the same class and shapes: loads with plain transformers
    deadweight reduce demo OUT --select key-bias,value-bias
    deadweight reduce mypkg.model:build OUT --inputs 2x64:int

    \b
    exit status: 0 done, 1 the result would not be the same function (nothing is written), 2 wrong usage or bad input
    """
    if out is None and not dry_run:
        raise DeadweightError("no OUT to write to; expected a folder, or --dry-run")
    report, page = JsonReport(json), HtmlReport(html)
    from deadweight.reduce.error_limits import DifferentError

    with progress_bar() as progress:
        try:
            result = deadweight.reduce(
                model,
                out,
                layout=layout.value,
                dry_run=dry_run,
                overwrite=overwrite,
                select=law_codes(select or []),
                ignore=law_codes(ignore or []),
                inputs=joined(inputs),
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        except DifferentError as error:
            complain(str(error))
            raise typer.Exit(DIFFERENT) from error
    deliver(result, report, page)


def deliver(result: Reduction, report: JsonReport, page: HtmlReport) -> None:
    from deadweight.reduce.deadweight_json import manifest
    from deadweight.report.reduction import print_reduction

    report.deliver(lambda: manifest(result), lambda console: print_reduction(result, console))
    page.deliver(result)
