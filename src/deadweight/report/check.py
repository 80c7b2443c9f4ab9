"""The result of a check in the terminal and as JSON: what fails, what passes and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from deadweight.lint.check import FAIL_ON, Check, CheckedModel
from deadweight.report.audit_json import as_text, to_json
from deadweight.report.audit_rows import group_findings
from deadweight.report.github import annotate_check
from deadweight.report.sarif import to_sarif
from deadweight.report.text import one_line, plural, printable
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__

LABEL = 8  # columns of the word in front of a line: "warning" and a space


def check_data(check: Check) -> JsonObject:
    """The audit of one model as JSON, or a list of audits."""
    audits = [to_json(model.audit) for model in check.models]
    return audits[0] if len(audits) == 1 else {"deadweight": __version__, "audits": audits}


def write_check(check: Check) -> None:
    """The check on standard output in a format for programs."""
    writers: dict[str, Callable[[], str]] = {
        "json": lambda: as_text(check_data(check)),
        "sarif": lambda: as_text(to_sarif(check)),
        "github": lambda: "".join(f"{line}\n" for line in (*annotate_check(check), summary(check))),
    }
    sys.stdout.write(writers[check.settings.output_format]())


def print_check(check: Check, console: Console) -> None:
    """What fails, line by line, and the summary."""
    for line in failing_lines(check):
        console.print(Text(line), soft_wrap=True)
    style = "bold red" if check.failed else "bold green"
    console.print(Text(summary(check), style), soft_wrap=True)
    if check.failing:
        console.print(Text(how_to_accept(check), "dim"), soft_wrap=True)


def how_to_accept(check: Check) -> str:
    """What to write if the findings that fail are to stay in the model."""
    laws = dict.fromkeys(group.law for model in check.models for group in group_findings(model.failing))
    return f"to keep what is listed: --ignore {','.join(laws)}, or --baseline FILE --update-baseline"


def failing_lines(check: Check) -> Iterator[str]:
    for model in check.models:
        yield from model_lines(model)
    for entry in check.gone:
        name = printable(f"{entry.code} {entry.parameter} of {entry.model}")
        yield f"{'gone':{LABEL}}{name}: still listed in the baseline"
    for accepted in check.idle:
        name = printable(accepted.parameter)
        yield f"{'note':{LABEL}}no finding is left to accept for {name}: {one_line(accepted.reason)}"


def model_lines(model: CheckedModel) -> Iterator[str]:
    """Failing rows, with the line of code and the fix; then what was accepted."""
    for group in group_findings(model.failing):
        source = group.findings[0].source
        where = f"{source}: " if source is not None else ""
        yield f"{group.severity:{LABEL}}{printable(f'{where}{group.code} {group.law}: {group.where}')}: {group.fix}"
    for accepted in model.passing("accepted"):
        finding = accepted.finding
        yield f"{'passes':{LABEL}}{finding.code} {printable(finding.parameter)}, accepted: {one_line(accepted.reason)}"


def summary(check: Check) -> str:
    """One line: how many findings fail, and why the others pass."""
    known = sum(len(model.passing("known")) for model in check.models)
    accepted = sum(len(model.passing("accepted")) for model in check.models)
    milder = sum(len(model.passing("milder")) for model in check.models)
    level = check.settings.fail_on or FAIL_ON
    parts = [f"{plural(check.failing, 'finding')} {'fails' if check.failing == 1 else 'fail'}"]
    parts += [f"{len(check.gone):,} gone from the baseline but listed there"] if check.gone else []
    parts += [f"{known:,} known"] if known else []
    parts += [f"{accepted:,} accepted"] if accepted else []
    parts += [f"{milder:,} milder than {level}"] if milder else []
    return f"check: {', '.join(parts)}"
