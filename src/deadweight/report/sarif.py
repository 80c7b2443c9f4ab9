"""A check in SARIF 2.1.0, the format in which code scanners exchange results."""

from __future__ import annotations

import hashlib
from pathlib import Path

from deadweight.audit.result import Finding, SourceLine
from deadweight.laws.page import Page, pages
from deadweight.lint.baseline import Entry
from deadweight.lint.check import Check, CheckedFinding, CheckedModel
from deadweight.report.audit_json import finding_data
from deadweight.report.name_pattern import pieces_text
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT = "%SRCROOT%"  # the folder in which the check ran; paths of results are relative to it


def to_sarif(check: Check) -> JsonObject:
    """One run with a rule for every law; accepted findings are suppressed, known ones unchanged, gone ones absent."""
    shown = [(model, c) for model in check.models for c in model.findings if c.passes != "milder"]
    results = [result_of(model, c, check.settings.baseline is not None) for model, c in shown]
    run = {
        "tool": {"driver": {"name": "deadweight", "version": __version__, "rules": [rule_of(p) for p in pages()]}},
        "invocations": [{"executionSuccessful": not notifications(check), **notifications(check)}],
        "results": [*results, *(absent_result(entry) for entry in check.gone)],
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def rule_of(page: Page) -> JsonObject:
    return {
        "id": page.code,
        "name": "".join(word.capitalize() for word in page.law.split("-")),
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": page.summary},
        "help": {"text": page.markdown, "markdown": page.markdown},
    }


def result_of(model: CheckedModel, checked: CheckedFinding, compared: bool) -> JsonObject:
    finding = checked.finding
    result: JsonObject = {
        "ruleId": finding.code,
        "ruleIndex": [page.code for page in pages()].index(finding.code),
        "level": finding.severity,
        "message": {"text": message_of(finding, model.audit.model)},
        "locations": [location_of(finding.source, model.target.model, finding.parameter)],
        "partialFingerprints": {"deadweight/v1": fingerprint(model.target.model, finding.code, place_of(finding))},
        "properties": {"model": model.audit.model, **finding_data(finding)},
    }
    if compared:
        result["baselineState"] = "unchanged" if checked.passes == "known" else "new"
    if checked.passes == "accepted":
        result["suppressions"] = [{"kind": "external", "justification": checked.reason}]
    return result


def absent_result(entry: Entry) -> JsonObject:
    """A finding of the baseline that is gone."""
    place = entry.parameter + pieces_text(entry.slice or None)
    return {
        "ruleId": entry.code,
        "level": "error",
        "message": {"text": f"{place} of {entry.model} is gone: take it out of the baseline with --update-baseline."},
        "locations": [location_of(None, entry.model, entry.parameter)],
        "partialFingerprints": {"deadweight/v1": fingerprint(entry.model, entry.code, place)},
        "baselineState": "absent",
    }


def location_of(source: SourceLine | None, model: str, parameter: str) -> JsonObject:
    """The line of code, where it is known, and the parameter."""
    logical = {"logicalLocations": [{"fullyQualifiedName": f"{model}::{parameter}", "kind": "member"}]}
    if source is None:
        return logical
    inside = not Path(source.path).is_absolute()
    artifact = {"uri": source.path, "uriBaseId": ROOT} if inside else {"uri": Path(source.file).as_uri()}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": source.line}}, **logical}


def message_of(finding: Finding, model: str) -> str:
    verdict = {"dead": "is dead", "folds": "folds into other parameters", "gauge": "is a gauge"}[finding.verdict]
    fix = f" Fix: {finding.fix}." if finding.fix else ""
    return f"{place_of(finding)} of {model} {verdict}: {finding.dof:,} numbers too many.{fix}"


def place_of(finding: Finding) -> str:
    return finding.parameter + pieces_text(finding.slice)


def fingerprint(*words: str) -> str:
    """A number that stays the same while lines of code move."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def notifications(check: Check) -> JsonObject:
    """Models that could not be audited; empty where all were."""
    words = [f"{m.audit.model}: {m.audit.unaudited}" for m in check.models if m.audit.unaudited is not None]
    failed = [{"level": "error", "message": {"text": text}} for text in words]
    return {"toolExecutionNotifications": failed} if failed else {}
