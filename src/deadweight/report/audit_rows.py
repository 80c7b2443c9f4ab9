"""Findings and unknowns grouped into the rows of the report: one per law and pattern of parameter names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from deadweight.audit.result import Finding, Pieces, Unknown
from deadweight.audit.severity import Severity
from deadweight.proof.verdict import Tier, Verdict
from deadweight.report.name_pattern import Pattern, collapse, collapse_with_names, join_pieces, pieces_text

_ORDER: dict[Verdict, int] = {"dead": 0, "folds": 1, "gauge": 2}


@dataclass(frozen=True)
class Group:
    """Findings of one law with the same verdict for the same parameter of several layers."""

    code: str
    law: str
    verdict: Verdict
    tier: Tier
    note: str
    pattern: Pattern
    pieces: Pieces | None
    findings: tuple[Finding, ...]

    @property
    def where(self) -> str:
        return f"{self.pattern}{pieces_text(self.pieces)}"

    @property
    def dof(self) -> int:
        return sum(f.dof for f in self.findings)

    @property
    def severity(self) -> Severity:
        return self.findings[0].severity

    @property
    def fix(self) -> str:
        return self.findings[0].fix

    @property
    def into(self) -> list[Pattern]:
        return collapse(name for f in self.findings for name in f.into)

    @property
    def evidence(self) -> float | None:
        return max((f.evidence for f in self.findings if f.evidence is not None), default=None)


@dataclass(frozen=True)
class Doubt:
    """Unknowns with the same reason for the same parameter of several layers."""

    pattern: Pattern
    blocked_by: str | None
    why: str


def group_findings(findings: Iterable[Finding]) -> list[Group]:
    """Rows by verdict (dead, folds, gauge), then by law, the law with most dof first."""
    alike: dict[tuple[str, str, Verdict, Tier, str], list[Finding]] = defaultdict(list)
    for f in findings:
        alike[f.code, f.law, f.verdict, f.tier, f.note].append(f)
    groups = [Group(*key, *place) for key, findings_alike in alike.items() for place in _places(findings_alike)]
    weight: dict[tuple[str, str], int] = defaultdict(int)
    for g in groups:
        weight[g.verdict, g.code] += g.dof
    return sorted(groups, key=lambda g: (_ORDER[g.verdict], -weight[g.verdict, g.code], g.code))


def group_unknown(unknown: Iterable[Unknown]) -> list[Doubt]:
    alike: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for u in unknown:
        alike[u.blocked_by, u.why].append(u.parameter)
    return [Doubt(pattern, *key) for key, names in alike.items() for pattern in collapse(names)]


def _places(findings: list[Finding]) -> list[tuple[Pattern, Pieces | None, tuple[Finding, ...]]]:
    """Findings split by the slice of the parameter, then by pattern of names.

    Findings about several slices of one parameter (one per head, say) are taken together: the union of the slices.
    """
    by_name: dict[str, list[Finding]] = defaultdict(list)
    for f in findings:
        by_name[f.parameter].append(f)
    by_pieces: dict[Pieces | None, list[str]] = defaultdict(list)
    for name, of_parameter in by_name.items():
        by_pieces[join_pieces(f.slice for f in of_parameter)].append(name)
    return [
        (pattern, pieces, tuple(f for name in members for f in by_name[name]))
        for pieces, names in by_pieces.items()
        for pattern, members in collapse_with_names(names)
    ]
