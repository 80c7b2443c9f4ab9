"""`deadweight audit`: which parameters are redundant, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

import deadweight
from deadweight.cli.options import AnyModel, Html, Ignore, Json, Select, TrustRemoteCode
from deadweight.cli.screen import HtmlReport, JsonReport, progress_bar
from deadweight.errors import DeadweightError
from deadweight.laws.page import law_codes
from deadweight.report.json_report import to_json
from deadweight.report.terminal import print_audit
from deadweight.report.text import printable

FOUND = 1


class Output(StrEnum):
    """What must stay the same."""

    logits = "logits"
    probabilities = "probabilities"


TrainingOption = Annotated[bool, typer.Option("--training", help="Audit the model in training mode.")]
OutputOption = Annotated[Output, typer.Option("--output", help="What must stay the same.")]
CompleteOption = Annotated[
    bool, typer.Option("--complete", help="Count all redundant dimensions on a narrow clone; do laws explain them?")
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="For CI: exit with 1 if a parameter is dead or folds, with 2 if no audit was possible."
    ),
]
GaugesOption = Annotated[
    bool, typer.Option("--gauges", help="With --check: also exit with 1 for gauges, which every transformer has.")
]
ProofsOption = Annotated[bool, typer.Option("--proofs", help="Print one proof for every row of the table.")]
LengthOption = Annotated[
    int | None, typer.Option("--length", metavar="N", min=2, help="Sequence length of the example inputs.")
]


def audit(
    model: AnyModel,
    json: Json = None,
    html: Html = None,
    training: TrainingOption = False,
    output: OutputOption = Output.logits,
    complete: CompleteOption = False,
    check: CheckOption = False,
    gauges: GaugesOption = False,
    select: Select = None,
    ignore: Ignore = None,
    trust_remote_code: TrustRemoteCode = False,
    proofs: ProofsOption = False,
    length: LengthOption = None,
) -> None:
    """List the redundant parameters of MODEL, with proofs, and those about which nothing could be proved.

    \b
    deadweight audit demo --proofs              every law with one of its proofs
    deadweight audit demo --complete            do the laws explain every redundant dimension?
    deadweight audit demo --json -              the same result as JSON
    deadweight audit demo --html demo.html      the same result as a page, with every proof
    deadweight audit ./config.json              no weights needed: only the architecture matters
    deadweight audit mypkg.model:build --check --select key-bias,value-bias
                                                in CI: fail if the model has one of these

    \b
    exit status: 0 done, 1 --check found something, 2 wrong usage, bad input, or a model that could not be audited
    """
    report, page = JsonReport(json), HtmlReport(html)
    with progress_bar() as progress:
        result = deadweight.audit(
            model,
            training=training,
            output=output.value,
            complete=complete,
            select=law_codes(select or []),
            ignore=law_codes(ignore or []),
            trust_remote_code=trust_remote_code,
            length=length,
            progress=progress,
        )
    report.deliver(lambda: to_json(result), lambda console: print_audit(result, console, proofs=proofs))
    page.deliver(result)
    if check and any(f.counts(gauges=gauges) for f in result.findings):
        raise typer.Exit(FOUND)
    if result.unaudited is not None and (check or not result.findings):
        raise DeadweightError(f"{printable(result.model)} could not be audited: {printable(result.unaudited)}")
