"""How severe a finding is: its level in SARIF and GitHub annotations, and what `--fail-on` compares."""

from __future__ import annotations

from typing import Literal

from deadweight.proof.verdict import Verdict

Severity = Literal["error", "warning", "note"]
SEVERITIES: dict[Verdict, Severity] = {"dead": "error", "folds": "warning", "gauge": "note"}  # the most severe first
