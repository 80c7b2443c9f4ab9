"""A check as annotations of GitHub: workflow commands that put a finding beside the line of code it is about."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.audit.result import Finding, SourceLine
from deadweight.audit.severity import Severity
from deadweight.lint.check import Check, CheckedModel
from deadweight.report.audit_rows import Group, group_findings
from deadweight.report.text import one_line, plural

LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def annotate_check(check: Check) -> Iterator[str]:
    """One line for every line of code and failing row of the report; then what is gone, and what was not audited."""
    for model in check.models:
        yield from model_annotations(model)
    baseline = check.settings.baseline
    for entry in check.gone:
        words = f"{entry.code} {entry.parameter} of {entry.model} is gone: take it out with --update-baseline"
        yield command(
            "error", "deadweight baseline", words, None if baseline is None else SourceLine(str(baseline), 1, "used")
        )


def model_annotations(model: CheckedModel) -> Iterator[str]:
    by_line: dict[SourceLine | None, list[Finding]] = {}
    for finding in model.failing:
        by_line.setdefault(finding.source, []).append(finding)
    for line, findings in by_line.items():
        for group in group_findings(findings):
            yield command(LEVELS[group.severity], f"{group.code} {group.law}", message_of(group, model), line)
    if model.audit.unaudited is not None:
        yield command("error", "not audited", f"{model.audit.model}: {model.audit.unaudited}", None)


def message_of(group: Group, model: CheckedModel) -> str:
    """What is redundant, and the fix."""
    verdict = {"dead": "is dead", "folds": "folds into other parameters", "gauge": "is a gauge"}[group.verdict]
    words = f"{group.where} of {model.audit.model} {verdict}: {plural(group.dof, 'number')} too many"
    return f"{words}. Fix: {group.fix}." if group.fix else f"{words}."


def command(level: str, title: str, message: str, line: SourceLine | None) -> str:
    """A workflow command; its values are escaped as GitHub asks."""
    properties = {"file": line.path, "line": str(line.line)} if line is not None else {}
    written = ",".join(
        f"{name}={escape(one_line(value), ':,')}" for name, value in {**properties, "title": title}.items()
    )
    return f"::{level} {written}::{escape(one_line(message))}"


def escape(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
