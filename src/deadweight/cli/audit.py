"""`deadweight audit`: which parameters are redundant, and why; and the same as a check."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deadweight.cli.options import ANY_MODEL, Html, Ignore, Inputs, Json, Select, TrustRemoteCode, joined
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, progress_bar, writable
from deadweight.errors import DeadweightError
from deadweight.laws.page import law_codes
from deadweight.lint.settings import FILE, LintSettings, Target, read_settings
from deadweight.report.text import printable

FOUND = 1


class Output(StrEnum):
    """The output that must stay the same."""

    logits = "logits"
    probabilities = "probabilities"


class OutputFormat(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"


class FailOn(StrEnum):
    """The mildest verdict on which a check fails."""

    dead = "dead"
    folds = "folds"
    gauge = "gauge"


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=f"{ANY_MODEL} Without it: the targets in {FILE}.")
]
TrainingOption = Annotated[bool, typer.Option("--training", help="Audit the model in training mode.")]
OutputOption = Annotated[Output, typer.Option("--output", help="The output that must stay the same.")]
CompleteOption = Annotated[
    bool,
    typer.Option("--complete", help="Count all redundant dimensions of a narrow clone, and those that laws explain."),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="For CI: exit with 1 if a parameter is dead or folds, with 2 if no audit was possible."
    ),
]
GaugesOption = Annotated[bool, typer.Option("--gauges", help="The same as --fail-on gauge.")]
FailOnOption = Annotated[
    FailOn | None,
    typer.Option(
        "--fail-on", help="Exit with 1 on this verdict or a worse one: dead is worst, then folds, then gauge."
    ),
]
FormatOption = Annotated[
    OutputFormat | None,
    typer.Option("--output-format", help="text; json; github (annotations of a pull request); sarif (code scanning)."),
]
BaselineOption = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Exit with 1 on findings that are not in this file, and on entries that are gone.",
    ),
]
UpdateOption = Annotated[
    bool, typer.Option("--update-baseline", help="Write the present findings to the --baseline file.")
]
ExitZeroOption = Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 even if a check fails.")]
ProofsOption = Annotated[bool, typer.Option("--proofs", help="Print one proof for every row of the table.")]
LengthOption = Annotated[
    int | None, typer.Option("--length", metavar="N", min=2, help="Sequence length of the example inputs.")
]


def audit(
    model: ModelArgument = None,
    inputs: Inputs = None,
    json: Json = None,
    html: Html = None,
    training: TrainingOption = False,
    output: OutputOption = Output.logits,
    complete: CompleteOption = False,
    check: CheckOption = False,
    gauges: GaugesOption = False,
    fail_on: FailOnOption = None,
    output_format: FormatOption = None,
    baseline: BaselineOption = None,
    update_baseline: UpdateOption = False,
    exit_zero: ExitZeroOption = False,
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
    deadweight audit mypkg.model:build --inputs 2x64:int
                                                your own module: build() returns it, 2 × 64 tokens go in
    deadweight audit mypkg.model:build --check --select key-bias,value-bias
                                                in CI: fail if the model has one of these
    deadweight audit mypkg.model:build --baseline known.json --update-baseline
                                                accept today's findings; without the flag, fail on new ones
    deadweight audit --output-format github     the targets of [tool.deadweight] in pyproject.toml, as annotations

    \b
    exit status: 0 done, 1 a check failed, 2 wrong usage, bad input, or a model that could not be audited
    """
    report, page = JsonReport(json), HtmlReport(html)
    if json == "-" and output_format not in (None, OutputFormat.json):
        raise DeadweightError(
            f"found --json - and --output-format {output_format.value}, both for standard output; expected --json FILE"
        )
    shapes = joined(inputs)
    target = Target(model or "", shapes, training, output.value, length, complete, trust_remote_code)
    settings = merge_settings(read_settings(Path.cwd()), target)
    if html is not None and len(settings.targets) > 1:
        raise DeadweightError(f"found --html for {len(settings.targets)} targets; expected one: name its MODEL")
    checks = check or gauges or bool(fail_on or settings.fail_on or baseline or settings.baseline)
    settings = replace(
        settings,
        select=law_codes(select or []) or settings.select,
        ignore=law_codes(ignore or []) or settings.ignore,
        fail_on="gauge" if gauges else fail_on.value if fail_on else settings.fail_on,
        baseline=baseline or settings.baseline,
        output_format=output_format.value if output_format else settings.output_format,
    )
    if settings.select and set(settings.select) <= set(settings.ignore or ()):
        raise DeadweightError("every law of --select is in --ignore too; expected at least one law to look for")
    if update_baseline:
        writable(settings.baseline, "--baseline")
    run_check(
        settings, report, page, proofs=proofs, checks=checks, update_baseline=update_baseline, exit_zero=exit_zero
    )


def merge_settings(project: LintSettings, given: Target) -> LintSettings:
    """The project's settings where no model, or one of its targets, is named; else the command line's alone.

    What the command line says about a target replaces what the project says.
    """
    if not given.model and not project.targets:
        raise DeadweightError(f"found no MODEL and no targets in [tool.deadweight] of {FILE}; expected one of them")
    if given.model and given.model not in [target.model for target in project.targets]:
        return LintSettings(targets=(given,))
    targets = [target for target in project.targets if given.model in ("", target.model)]
    return replace(project, targets=tuple(merge_target(target, given) for target in targets))


def merge_target(target: Target, given: Target) -> Target:
    return Target(
        target.model,
        given.inputs or target.inputs,
        given.training or target.training,
        target.output if given.output == "logits" else given.output,
        given.length or target.length,
        given.complete or target.complete,
        given.trust_remote_code or target.trust_remote_code,
    )


def run_check(
    settings: LintSettings,
    report: JsonReport,
    page: HtmlReport,
    *,
    proofs: bool,
    checks: bool,
    update_baseline: bool,
    exit_zero: bool,
) -> None:
    """Audit the targets, report, and exit with what the check says."""
    from deadweight.lint.check import check_targets
    from deadweight.report.audit_terminal import print_audit
    from deadweight.report.check import check_data, print_check, write_check

    with progress_bar() as progress:
        result = check_targets(settings, progress, update_baseline=update_baseline)

    def show(console: Console) -> None:
        if settings.output_format != "text":
            write_check(result)
            return
        for checked in result.models:
            print_audit(checked.audit, console, proofs=proofs)
        if checks:
            print_check(result, console)

    report.deliver(lambda: check_data(result), show)
    for checked in result.models:
        page.deliver(checked.audit)
    if checks and result.failed and not exit_zero:
        raise typer.Exit(FOUND)
    for audit_ in (checked.audit for checked in result.models):
        if audit_.unaudited is not None and (checks or not audit_.findings):
            raise DeadweightError(f"{printable(audit_.model)} could not be audited: {printable(audit_.unaudited)}")
        if audit_.uncounted is not None:
            raise DeadweightError(f"redundant dimensions were not counted: {printable(audit_.uncounted)}")
