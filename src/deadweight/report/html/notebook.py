"""Every result as a fragment for notebooks: the same values, without a script."""

from __future__ import annotations

from deadweight.audit.result import Audit
from deadweight.evaluate.run import Evaluation
from deadweight.report.html.audit_page import render_audit_fragment
from deadweight.report.html.render import Measured, describe
from deadweight.report.html.report import render_report_fragment


def render_fragment(result: Audit | Evaluation | Measured) -> str:
    if isinstance(result, Audit):
        return render_audit_fragment(result)
    return render_report_fragment(describe([result] if isinstance(result, Evaluation) else result))
