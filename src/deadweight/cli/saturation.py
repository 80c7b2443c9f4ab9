"""`deadweight saturation`: does the softmax of each head saturate with length?"""

from __future__ import annotations

from typing import Annotated

import typer

from deadweight.cli.options import Json, Plot, Text, TrustRemoteCode
from deadweight.cli.screen import JsonReport, drawable, progress_bar

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model of text: folder, hub id, or demo.")]
LengthOption = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="The longest context looked at. Default: 1024, if the model can."),
]
WindowsOption = Annotated[int, typer.Option("--windows", help="Windows of the text; more make slopes surer.")]
RowsOption = Annotated[int, typer.Option("--rows", help="Rows of each window looked at for each length, at most.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the rows that are looked at.")]
HeadsOption = Annotated[bool, typer.Option("--heads", help="A row for each head, not for each layer.")]


def saturation(
    model: ModelArgument,
    text: Text = "embedded",
    length: LengthOption = None,
    windows: WindowsOption = 8,
    rows: RowsOption = 16,
    seed: SeedOption = 0,
    heads: HeadsOption = False,
    json: Json = None,
    plot: Plot = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Do the heads of MODEL become less sensitive to their logits as the context grows?

    How much a row of attention answers to a change of its logits is the norm of diag(p) − ppᵀ: at most ½, 1/L for
    weights spread over L tokens, ½ for two tokens that share all weight, however many others there are. Published work
    (arXiv 2510.03784) says that it falls like 1/L, so that long contexts and late layers need less. That assumes
    bounded logits. Here the exact norm is measured at 4, 8, … keys, for every head, with the slope of its logarithm
    (−1: falls like 1/L; 0: stays), and the range of the logits beside it.

    \b
    deadweight saturation demo                                 a small model on Python's manual, in seconds
    deadweight saturation MODEL --text book.txt --plot s.svg   norm by length, slopes, logit ranges
    deadweight saturation MODEL --text book.txt --heads        every head, with standard errors
    deadweight saturation MODEL --text book.txt --json s.json
    deadweight allocate plan --layers 30 --width 576 --heads 9 --saturation s.json
                                                               a plan that gives saturated layers less

    \b
    exit status: 0 done, 2 wrong usage or bad input
    """
    from deadweight.report.saturation import plot_saturation, print_saturation, saturation_data
    from deadweight.saturation.run import saturation as measure

    report, drawing = JsonReport(json), drawable(plot)
    with progress_bar() as progress:
        result = measure(
            model,
            text,
            length=length,
            windows=windows,
            rows=rows,
            seed=seed,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    report.deliver(lambda: saturation_data(result), lambda console: print_saturation(result, console, heads=heads))
    if drawing is not None:
        plot_saturation(saturation_data(result), drawing)
