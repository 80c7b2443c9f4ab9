"""Every result as the text that its command prints, for `print(result)`."""

from __future__ import annotations

import io

from deadweight.audit.result import Audit
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.result import Compression
from deadweight.evaluate.run import Evaluation, Evaluations
from deadweight.reduce.result import Reduction
from deadweight.report.audit_terminal import make_console, print_audit
from deadweight.report.compression import print_compression
from deadweight.report.evaluation import print_evaluation
from deadweight.report.reduction import print_reduction
from deadweight.report.saturation import print_saturation
from deadweight.saturation.run import Saturation

Result = Audit | Evaluation | Evaluations | Reduction | Compression | CacheCompression | Saturation


def printed(result: Result) -> str:
    """The report without colours."""
    text = io.StringIO()
    console = make_console(text)
    if isinstance(result, Audit):
        print_audit(result, console)
    elif isinstance(result, (Evaluation, Evaluations)):
        print_evaluation([result] if isinstance(result, Evaluation) else result, console)
    elif isinstance(result, Reduction):
        print_reduction(result, console)
    elif isinstance(result, Saturation):
        print_saturation(result, console)
    else:
        print_compression(result, console)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
