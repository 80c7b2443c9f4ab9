"""A check: the audits of all targets, and which findings fail it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from deadweight.audit.result import Audit, Finding, SourceLine
from deadweight.errors import DeadweightError
from deadweight.graph.origin import is_library
from deadweight.laws.page import pages
from deadweight.lint.baseline import Entry, entry_of, read_baseline, write_baseline
from deadweight.lint.settings import Accepted, LintSettings, Target
from deadweight.progress import Progress, silent
from deadweight.proof.verdict import Verdict
from deadweight.source import factory

Audits = Sequence[tuple[Target, Audit]]
FAIL_ON: Verdict = "folds"  # what fails where nothing else is said: dead parameters and those that fold


@dataclass(frozen=True)
class CheckedFinding:
    """A finding and why it does not fail the check; empty: it does."""

    finding: Finding
    passes: str = ""  # "known", "accepted" or "milder"
    reason: str = ""  # of an accepted finding


@dataclass(frozen=True)
class CheckedModel:
    """One audit, and what the check says about each of its findings."""

    target: Target
    audit: Audit
    findings: tuple[CheckedFinding, ...]

    @property
    def failing(self) -> tuple[Finding, ...]:
        return tuple(c.finding for c in self.findings if not c.passes)

    def passing(self, why: str) -> tuple[CheckedFinding, ...]:
        return tuple(c for c in self.findings if c.passes == why)


@dataclass(frozen=True)
class Check:
    """The result for all targets."""

    models: tuple[CheckedModel, ...]
    settings: LintSettings
    gone: tuple[Entry, ...] = ()  # listed in the baseline and no longer there
    idle: tuple[Accepted, ...] = ()  # accepted, and matching no finding

    @property
    def failing(self) -> int:
        return sum(len(model.failing) for model in self.models)

    @property
    def failed(self) -> bool:
        return bool(self.failing or self.gone)


def check_targets(settings: LintSettings, progress: Progress = silent, *, update_baseline: bool = False) -> Check:
    """Audit every target and compare with the baseline; with `update_baseline`, write the baseline first."""
    file = settings.baseline
    if update_baseline and file is None:
        raise DeadweightError(
            "found --update-baseline without a file; expected --baseline FILE, or baseline in pyproject.toml"
        )
    listed = read_baseline(file) if file is not None and (file.exists() or not update_baseline) else frozenset()
    audits = [(target, audit_or_say_why(target, settings, progress)) for target in settings.targets]
    if update_baseline and file is not None:
        listed = frozenset(updated_entries(audits, settings, listed))
        write_baseline(file, listed)
    return make_check(audits, settings, listed)


def audit_or_say_why(target: Target, settings: LintSettings, progress: Progress) -> Audit:
    """The audit of a target. One of several that does not run must not hide the others: it is reported as unaudited."""
    try:
        return audit_target(target, settings, progress)
    except DeadweightError as error:
        if len(settings.targets) == 1:
            raise
        return Audit(target.model, 0, (), untested=str(error))


def audit_target(target: Target, settings: LintSettings, progress: Progress) -> Audit:
    """The audit of one target; its findings lie in the user's own code where that is possible."""
    from deadweight.audit.run import audit  # here, because it takes seconds: settings are read before

    result = audit(
        target.model,
        target.inputs,
        training=target.training,
        output=target.output,
        complete=target.complete,
        select=settings.select,
        ignore=settings.ignore,
        trust_remote_code=target.trust_remote_code,
        length=target.length,
        progress=progress,
    )
    line = factory_line(target.model)
    return replace(result, findings=tuple(in_own_code(f, line) for f in result.findings))


def make_check(audits: Audits, settings: LintSettings, listed: frozenset[Entry]) -> Check:
    """The check of models that were audited."""
    models = tuple(judge(target, result, settings, listed) for target, result in audits)
    present = {entry_of(m.target.model, f) for m in models for f in m.audit.findings}
    seen = [e for e in listed if is_seen(e, audits, settings)]
    idle = [a for a in settings.accept if not any(accepts(a, f) for m in models for f in m.audit.findings)]
    return Check(models, settings, tuple(sorted(e for e in seen if e not in present)), tuple(idle))


def updated_entries(audits: Audits, settings: LintSettings, listed: frozenset[Entry]) -> Iterator[Entry]:
    """What fails today, and what is listed about models and laws that this check does not see."""
    yield from (entry for entry in listed if not is_seen(entry, audits, settings))
    for target, result in audits:
        yield from (entry_of(target.model, f) for f in judge(target, result, settings, frozenset()).failing)


def is_seen(entry: Entry, audits: Audits, settings: LintSettings) -> bool:
    """Whether this check would report an entry if it still held: its model was audited, and its law is selected."""
    audited = {target.model for target, result in audits if result.unaudited is None}
    selected = set(settings.select or (page.code for page in pages())) - set(settings.ignore or ())
    return entry.model in audited and entry.code in selected


def judge(target: Target, result: Audit, settings: LintSettings, listed: frozenset[Entry]) -> CheckedModel:
    """What the check says about each finding."""

    def judged(finding: Finding) -> CheckedFinding:
        accepted = next((a for a in settings.accept if accepts(a, finding)), None)
        if accepted is not None:
            return CheckedFinding(finding, "accepted", accepted.reason)
        if not finding.fails(settings.fail_on or FAIL_ON):
            return CheckedFinding(finding, "milder")
        return CheckedFinding(finding, "known" if entry_of(target.model, finding) in listed else "")

    return CheckedModel(target, result, tuple(map(judged, result.findings)))


def accepts(accepted: Accepted, finding: Finding) -> bool:
    named = not accepted.laws or finding.code in accepted.laws
    return named and fnmatchcase(finding.parameter, accepted.parameter)


def factory_line(spec: str) -> SourceLine | None:
    """Where the function that builds a model is defined; None for a model that is a file."""
    if not factory.looks_like(spec) or Path(spec).exists():
        return None
    target = inspect.unwrap(factory.find_callable(spec))
    try:
        file, (_, line) = inspect.getsourcefile(target), inspect.getsourcelines(target)
    except (OSError, TypeError):
        return None
    return None if file is None else SourceLine(file, line, "built")


def in_own_code(finding: Finding, line: SourceLine | None) -> Finding:
    """The finding at a line of the user's code: of a library's module, the function that builds the model."""
    own = finding.source is not None and not is_library(finding.source.file)
    return finding if own or line is None else replace(finding, source=line)
