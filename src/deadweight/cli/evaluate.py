"""`deadweight evaluate`: perplexity, bits per byte, speed and size of the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from deadweight.cli.options import Html, Json, Text, TrustRemoteCode
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, progress_bar
from deadweight.errors import DeadweightError


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A causal language model: folder, hub id, or demo.")],
    text: Text = "embedded",
    against: Annotated[
        str | None, typer.Option("--against", metavar="ORIGINAL", help="Compare with this model.")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=2, help="Tokens per window.")] = None,
    limit: Annotated[
        int | None, typer.Option("--bytes", min=2, help="Read at most this many bytes of the text.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows per batch.")] = 8,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: as stored.")
    ] = None,
    json: Json = None,
    html: Html = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure perplexity, bits per byte, speed and cache size of MODEL on a text; with --against, of two models.

    \b
    deadweight evaluate demo --text embedded
    deadweight evaluate OUT --text book.txt --against ORIGINAL

    \b
    exit status: 0 done, 2 wrong usage or bad input
    """
    from deadweight.evaluate.run import evaluate as judge
    from deadweight.report.evaluation import as_data, print_evaluation

    report, page = JsonReport(json), HtmlReport(html)
    if dtype not in (None, "float32", "bfloat16", "float16", "float64"):
        raise DeadweightError(f"found --dtype {dtype}; expected float32, bfloat16, float16 or float64")
    with progress_bar() as progress:
        evaluations = judge(
            model,
            text,
            against=against,
            context=context,
            limit=limit,
            batch=batch,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    report.deliver(
        lambda: {"text": text, "models": [as_data(e) for e in evaluations]},
        lambda console: print_evaluation(evaluations, console),
    )
    page.deliver(evaluations)
