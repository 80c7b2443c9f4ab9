"""`deadweight demo`: a first look, offline, in seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.text import Text

import deadweight
from deadweight.cli.progress_and_output import progress_bar
from deadweight.report.audit_terminal import make_console, print_audit

AFTER = """
That was a model that comes with deadweight. Now try
  deadweight audit demo --complete     count every redundant dimension and see whether a law explains it
  deadweight explain key-bias          read one law, with its proof and its limits
  deadweight reduce demo OUT           write the smaller model, and read OUT/README.md
  deadweight audit YOUR_MODEL          a folder, a hub id, a config.json, a .gguf, or package.module:callable
"""


def demo() -> None:
    """Audit the small trained model that comes with the package, reduce it, and check the result. Works offline.

    \b
    deadweight demo
    """
    from deadweight.report.reduction import print_reduction

    console = make_console()
    with progress_bar() as progress:
        result = deadweight.audit("demo", progress=progress)
    print_audit(result, console, proofs=True)
    with tempfile.TemporaryDirectory() as folder:
        with progress_bar() as progress:
            reduction = deadweight.reduce("demo", Path(folder) / "slim", progress=progress)
        print_reduction(reduction, console)
    console.print(Text(AFTER))
