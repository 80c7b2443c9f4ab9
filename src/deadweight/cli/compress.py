"""`deadweight compress`: smaller heads and a smaller cache, at a measured loss."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deadweight.cli.options import Html, Json, LayoutName, Overwrite, TrustRemoteCode
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, plain, progress_bar


class MethodName(StrEnum):
    """How the budget is spread over the heads."""

    knapsack = "knapsack"
    layer = "layer"
    uniform = "uniform"


class KeysName(StrEnum):
    """How far the numbers of keys are mixed before they are coded."""

    joint = "joint"
    all = "all"
    head = "head"
    block = "block"
    pair = "pair"
    scale = "scale"


def compress(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id, or the word demo.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The folder to write: complete, or not at all.")
    ] = None,
    keep_kv: Annotated[
        float | None,
        typer.Option("--keep-kv", metavar="SHARE", help="Of the bytes of a 16-bit cache, at most this. Default 0.25."),
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", metavar="BITS", help="The same as bits per number: 4 is --keep-kv 0.25.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option("--max-loss", metavar="NATS", help="The smallest cache that costs at most this much loss."),
    ] = None,
    keep_attention: Annotated[
        float | None,
        typer.Option("--keep-attention", metavar="SHARE", help="Of the attention weights, at most this share."),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Measure the loss of caches of many sizes; write no model.")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option("--text", help="Calibration text: a file, a folder, datasets:NAME. Default: a mixture of texts."),
    ] = None,
    judge_text: Annotated[
        str | None, typer.Option("--judge-text", help="Judge on this text too: choose one of another kind.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the bits by layer, or the curve: .svg, .png.")
    ] = None,
    heal: Annotated[int, typer.Option("--heal", metavar="STEPS", min=0, help="Distil from the original.")] = 0,
    heal_text: Annotated[
        str | None, typer.Option("--heal-text", metavar="TEXT", help="Text to heal on. Default: the rest of --text.")
    ] = None,
    heal_rate: Annotated[float, typer.Option("--heal-rate", help="Learning rate of healing.")] = 2e-4,
    windows: Annotated[int, typer.Option("--windows", min=2, help="Number of calibration windows.")] = 32,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, help="Tokens per calibration window. Default: 1024, or the model's context if shorter."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Calibration windows per batch.")] = None,
    keys: Annotated[
        KeysName | None,
        typer.Option(
            "--keys",
            help="What is mixed before coding: keys with values, keys of all heads, of one head, blocks of 16, rotary "
            "pairs, or nothing. More mixing loses less and takes longer to decode. Default: by size.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="For images or sound: safetensors, a row per sample."),
    ] = None,
    layout: Annotated[
        LayoutName,
        typer.Option("--layout", help="Of smaller heads. slim: really smaller; stock: loads anywhere, with zeros."),
    ] = LayoutName.slim,
    method: Annotated[
        MethodName,
        typer.Option("--method", help="Of smaller heads. knapsack: by head; layer: by layer; uniform: all alike."),
    ] = MethodName.knapsack,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Of smaller heads: sizes are multiples of this. Default: 1/16 of a head."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = None,
    html: Html = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make the key-value cache smaller at a measured loss: give every direction the bits that the loss says it needs.

    Keys and values are measured on text, transformed to coordinates of which each costs the loss the same, and stored
    in 0 to 8 bits each. The loss is measured on text that was held back, and printed: this is not the same function.
    The weights stay as they are. --keep-attention makes the heads smaller instead: every head keeps the dimensions that
    matter most. That is for models without a cache, and for checkpoints that plain transformers loads (--layout stock).
    What costs nothing is removed by `deadweight reduce`.

    Healing that was stopped goes on when the same command is given again; until then its state is kept beside OUT, in a
    folder named .OUT.healing-….

    \b
    deadweight compress MODEL --curve --judge-text book.txt     loss against size: choose a point
    deadweight compress MODEL OUT --keep-kv 0.25                a quarter of the bytes of a 16-bit cache
    deadweight compress MODEL OUT --max-loss 0.01               the smallest cache at 1 % more perplexity
    deadweight compress MODEL OUT --bits 2 --text book.txt --heal 500
    deadweight compress ENCODER OUT --keep-attention 0.5 --text book.txt
    torchrun --nproc-per-node 8 -m deadweight compress MODEL OUT --bits 2 --text book.txt --heal 500
    deadweight evaluate OUT --against MODEL --text other.txt

    \b
    exit status: 0 done, 2 wrong usage or bad input
    """
    report, page = JsonReport(json), HtmlReport(html)
    from rich.console import Console

    from deadweight.compress.run import compress as run
    from deadweight.errors import DeadweightError
    from deadweight.report.compression import as_data, plot_compression, print_compression
    from deadweight.train.launch import first_process

    if out is None and not curve:
        raise DeadweightError("found no OUT to write the model to; expected one, or --curve to measure only")
    if out is not None and curve:
        raise DeadweightError("found OUT and --curve, which writes no model; expected one of them")
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    with progress_bar() as progress:
        result = run(model, out, progress=progress, **{n: getattr(v, "value", v) for n, v in options.items()})

    def show(console: Console) -> None:
        print_compression(result, console)
        after = "" if out is None else f"\ndeadweight evaluate {out} --against {model}"
        plain(f"\n{result.seconds:.0f} s{after}")

    if first_process():  # of many one speaks
        if plot is not None:
            plot_compression(result, plot)
        report.deliver(lambda: as_data(result), show)
        page.deliver(result)


OPTIONS = (
    "keep_kv", "bits", "max_loss", "keep_attention", "curve", "text", "judge_text", "heal", "heal_text", "heal_rate",
    "windows", "length", "batch", "keys", "inputs", "layout", "method", "step", "overwrite",
    "trust_remote_code",
)  # fmt: skip
