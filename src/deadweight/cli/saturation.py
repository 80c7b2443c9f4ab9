"""`deadweight saturation`: does the softmax of each head saturate with length?"""

from __future__ import annotations

from typing import Annotated

import typer

from deadweight.cli.options import Html, Json, Plot, Text, TrustRemoteCode
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, drawable, progress_bar

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A language model: a folder, a hub id, or demo.")]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length",
        metavar="N",
        help="Longest context to measure. Default: 1024, or the model's context if that is shorter.",
    ),
]
WindowsOption = Annotated[
    int, typer.Option("--windows", help="Number of text windows. More windows make the slopes more certain.")
]
RowsOption = Annotated[int, typer.Option("--rows", help="Attention rows to sample per window and length.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampled rows.")]
HeadsOption = Annotated[bool, typer.Option("--heads", help="Print one line per head instead of one per layer.")]


def saturation(
    model: ModelArgument,
    text: Text = "embedded",
    length: LengthOption = None,
    windows: WindowsOption = 8,
    rows: RowsOption = 16,
    seed: SeedOption = 0,
    heads: HeadsOption = False,
    json: Json = None,
    html: Html = None,
    plot: Plot = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure how the sensitivity of every head to its logits changes as the context grows.

    The sensitivity of an attention row to its logits is the norm of the softmax Jacobian diag(p) − ppᵀ. It is 1/L for
    weights spread evenly over L tokens and ½ for two tokens that share all the weight. Published work (arXiv
    2510.03784) says that it falls like 1/L, so that long contexts and late layers need smaller heads. That assumes
    bounded logits. This command measures the exact norm at 4, 8, … keys for every head, and reports the slope of its
    logarithm against log L (−1: it falls like 1/L; 0: it stays), and the range of the logits.

    \b
    deadweight saturation demo                                 a small model on Python's manual, in seconds
    deadweight saturation MODEL --text book.txt --plot s.svg   norm by length, slopes, logit ranges
    deadweight saturation MODEL --text book.txt --heads        every head, with standard errors
    deadweight saturation MODEL --text book.txt --json s.json  for deadweight allocate plan --saturation s.json

    \b
    exit status: 0 done, 2 wrong usage or bad input
    """
    from deadweight.report.saturation import plot_saturation, print_saturation, saturation_data
    from deadweight.saturation.run import saturation as measure

    report, page, drawing = JsonReport(json), HtmlReport(html), drawable(plot)
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
    data = saturation_data(result)
    report.deliver(lambda: data, lambda console: print_saturation(result, console, heads=heads))
    page.deliver(result)
    if drawing is not None:
        plot_saturation(data, drawing)
