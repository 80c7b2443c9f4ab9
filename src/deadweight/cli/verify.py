"""`deadweight verify`: are two checkpoints the same function?"""

from __future__ import annotations

from typing import Annotated

import typer

import deadweight
from deadweight.cli.options import Inputs, Json, TrustRemoteCode, joined
from deadweight.cli.progress_and_output import JsonReport, progress_bar

DIFFERENT = 1


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="The original model.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to compare with it.")],
    json: Json = None,
    inputs: Inputs = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check that A and B are the same function, in float64 and, up to A's rounding noise, in their own precision.

    \b
    deadweight verify demo OUT
    deadweight verify ./original ./fused --json -
    deadweight verify mypkg.model:before mypkg.model:after --inputs 2x64:int

    \b
    exit status: 0 the same function, 1 different, 2 wrong usage or bad input
    """
    report = JsonReport(json)
    from deadweight.reduce.deadweight_json import verification_data
    from deadweight.report.reduction import print_verification

    with progress_bar() as progress:
        result = deadweight.verify(a, b, inputs=joined(inputs), trust_remote_code=trust_remote_code, progress=progress)
    report.deliver(lambda: verification_data(result), lambda console: print_verification(result, console))
    if not result.same:
        raise typer.Exit(DIFFERENT)
