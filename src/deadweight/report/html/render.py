"""Every result as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence

from deadweight.audit.result import Audit
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.result import Compression
from deadweight.evaluate.run import Evaluation
from deadweight.reduce.result import Reduction
from deadweight.report.html.audit_page import render_audit
from deadweight.report.html.compression_page import describe_compression
from deadweight.report.html.evaluation_page import describe_evaluation
from deadweight.report.html.reduction_page import describe_reduction
from deadweight.report.html.report import Report, render_report
from deadweight.report.html.saturation_page import describe_saturation
from deadweight.saturation.run import Saturation

Measured = Reduction | Compression | CacheCompression | Saturation | Sequence[Evaluation]
Result = Audit | Measured


def render_html(result: Result) -> str:
    """One HTML page that needs nothing but itself."""
    return render_audit(result) if isinstance(result, Audit) else render_report(describe(result))


def describe(result: Measured) -> Report:
    match result:
        case Reduction():
            return describe_reduction(result)
        case Compression() | CacheCompression():
            return describe_compression(result)
        case Saturation():
            return describe_saturation(result)
        case _:
            return describe_evaluation(result)
