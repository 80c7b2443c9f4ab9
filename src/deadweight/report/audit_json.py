"""The JSON report: a stable format for programs."""

from __future__ import annotations

import json
import math

from deadweight.audit.result import Audit, Completeness, Finding, SourceLine
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__


def to_json(audit: Audit) -> JsonObject:
    """An audit as plain JSON data.

    There are three kinds of unknowns: a blocked parameter with its op, a zero gradient that no law explains
    (`blocked_by` is null), and, where the model could not be traced or measured, one entry for all parameters (`"*"`).
    """
    unknown = [{"parameter": u.parameter, "blocked_by": u.blocked_by, "why": u.why} for u in audit.unknown]
    if audit.untraced is not None:
        unknown.append({"parameter": "*", "blocked_by": "torch.export", "why": audit.untraced})
    elif audit.unaudited is not None:
        unknown.append({"parameter": "*", "blocked_by": None, "why": f"not audited: {audit.unaudited}"})
    return {
        "deadweight": __version__,
        "model": audit.model,
        "parameters": audit.parameters,
        "redundant": audit.redundant,
        "findings": [finding_data(f) for f in audit.findings],
        "unknown": unknown,
        "completeness": _completeness(audit.completeness),
    }


def as_text(data: JsonObject) -> str:
    """Data as ASCII text: no name in it can send control characters to a terminal or break an encoding."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def finding_data(f: Finding) -> JsonObject:
    """A finding as plain JSON data."""
    return {
        "code": f.code,
        "law": f.law,
        "parameter": f.parameter,
        "slice": None if f.slice is None else [[start, stop] for start, stop in f.slice],
        "elements": f.elements,
        "dof": f.dof,
        "verdict": f.verdict,
        "into": list(f.into),
        "tier": f.tier,
        "proof": list(f.proof),
        "evidence": f.evidence if f.evidence is not None and math.isfinite(f.evidence) else None,
        "unreplayed": f.unreplayed,
        "severity": f.severity,
        "fix": f.fix,
        "saves": {"parameters": f.payoff.parameters, "bytes": f.payoff.bytes, "flops_per_token": f.payoff.flops},
        "source": None if f.source is None else source_data(f.source),
    }


def source_data(source: SourceLine) -> JsonObject:
    """A line of code; the file relative to the working directory where it lies inside."""
    return {"file": source.path, "line": source.line, "role": source.role}


def _completeness(c: Completeness | None) -> dict[str, int] | None:
    return None if c is None else {"measured": c.measured, "explained": c.explained}
