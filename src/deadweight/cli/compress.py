"""`deadweight compress`: smaller heads and a smaller cache, at a measured loss."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deadweight.cli.options import Json, LayoutName, Overwrite, TrustRemoteCode
from deadweight.cli.screen import JsonReport, plain, progress_bar


class MethodName(StrEnum):
    """How the budget is spread over the heads."""

    knapsack = "knapsack"
    layer = "layer"
    uniform = "uniform"


def compress(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id, or the word demo.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write: complete, or not at all.")],
    keep_kv: Annotated[
        float | None, typer.Option("--keep-kv", metavar="SHARE", help="Of the cache, at most this share. Default 0.75.")
    ] = None,
    keep_attention: Annotated[
        float | None,
        typer.Option("--keep-attention", metavar="SHARE", help="Of the attention weights, at most this share."),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option("--max-loss", metavar="NATS", help="As small a cache as this much more loss per token allows."),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="What to measure on: a file, a folder, datasets:NAME, embedded.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="For images or sound: safetensors, a row per sample."),
    ] = None,
    layout: Annotated[
        LayoutName, typer.Option("--layout", help="slim: really smaller; stock: loads anywhere, padded with zeros.")
    ] = LayoutName.slim,
    method: Annotated[
        MethodName, typer.Option("--method", help="knapsack: by head, exactly; layer: by layer; uniform: all alike.")
    ] = MethodName.knapsack,
    heal: Annotated[int, typer.Option("--heal", metavar="STEPS", min=0, help="Distil from the original.")] = 0,
    heal_text: Annotated[
        str | None, typer.Option("--heal-text", metavar="TEXT", help="On this text. Default: the rest of --text.")
    ] = None,
    heal_rate: Annotated[float, typer.Option("--heal-rate", help="Its learning rate.")] = 2e-4,
    windows: Annotated[int, typer.Option("--windows", min=2, help="Pieces of text to measure on.")] = 32,
    length: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens in each: as many as it will read. Default 1024.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Pieces at a time.")] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Sizes are multiples of this. Default: 1/16 of a head; of shared ones, 8."),
    ] = None,
    merge: Annotated[
        int | None,
        typer.Option("--merge", min=1, help="Key heads that share what they cache. Default: up to 512 wide."),
    ] = None,
    late: Annotated[
        bool, typer.Option("--late", help="Cache keys before rotary positions: less is lost, decoding does more.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Keep of every attention head the dimensions that matter, measured on text; write a model with a smaller cache.

    The loss is measured on text that was held back, and printed: this is not the same function. What costs nothing is
    taken out by `deadweight reduce`. Healing that was stopped goes on when the same command is given again; until then
    its state lies beside OUT, in a folder named .OUT.healing-….

    \b
    deadweight compress demo OUT --keep-kv 0.5
    deadweight compress MODEL OUT --keep-kv 0.75 --text book.txt
    deadweight compress MODEL OUT --max-loss 0.02 --text book.txt      2 % of perplexity
    deadweight compress ENCODER OUT --keep-attention 0.5 --text book.txt
    deadweight compress MODEL OUT --keep-kv 0.5 --text book.txt --heal 500
    torchrun --nproc-per-node 8 -m deadweight compress MODEL OUT --keep-kv 0.5 --text book.txt --heal 500
    deadweight evaluate OUT --against MODEL --text other.txt

    \b
    exit status: 0 done, 2 wrong usage or bad input
    """
    report = JsonReport(json)
    from rich.console import Console

    from deadweight.compress.manifest import as_data
    from deadweight.compress.run import compress as run
    from deadweight.report.compression import print_compression
    from deadweight.train.launch import first_process

    with progress_bar() as progress:
        found = run(
            model,
            out,
            keep_kv=keep_kv,
            keep_attention=keep_attention,
            max_loss=max_loss,
            text=text,
            inputs=inputs,
            layout=layout.value,
            method=method.value,
            heal=heal,
            heal_text=heal_text,
            heal_rate=heal_rate,
            windows=windows,
            length=length,
            batch=batch,
            step=step,
            merge=merge,
            late=late,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )

    def show(console: Console) -> None:
        print_compression(found, console)
        plain(f"\n{found.seconds:.0f} s\ndeadweight evaluate {out} --against {model}")

    if first_process():  # of many one speaks
        report.deliver(lambda: as_data(found), show)
