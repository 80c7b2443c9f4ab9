"""`deadweight compress`: smaller heads and a smaller cache, at a measured loss."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deadweight.cli.options import Html, Json, LayoutName, Overwrite, TrustRemoteCode
from deadweight.cli.progress_and_output import HtmlReport, JsonReport, drawable, plain, progress_bar
from deadweight.errors import DeadweightError

if TYPE_CHECKING:
    from deadweight.compress.cache_result import CacheCompression
    from deadweight.compress.result import Compression


class MethodName(StrEnum):
    """How the budget is spread over the heads."""

    knapsack = "knapsack"
    layer = "layer"
    uniform = "uniform"


class KeysName(StrEnum):
    """What one transform mixes before keys and values are coded."""

    joint = "joint"
    all = "all"
    head = "head"
    half = "half"
    block = "block"
    pair = "pair"
    scale = "scale"


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id, or demo.")]
OutArgument = Annotated[
    Path | None, typer.Argument(metavar="OUT", help="The folder to write. It appears only when it is complete.")
]
KeepKvOption = Annotated[
    float | None,
    typer.Option("--keep-kv", metavar="SHARE", help="Largest size, as a share of a 16-bit cache. Default: 0.25."),
]
BitsOption = Annotated[
    float | None,
    typer.Option("--bits", metavar="BITS", help="The same in bits per number: --bits 4 is --keep-kv 0.25."),
]
MaxLossOption = Annotated[
    float | None,
    typer.Option("--max-loss", metavar="NATS", help="Find the smallest cache that adds at most this loss per token."),
]
KeepAttentionOption = Annotated[
    float | None,
    typer.Option(
        "--keep-attention",
        metavar="SHARE",
        help="Make heads smaller instead: keep this share of the attention weights.",
    ),
]
CurveOption = Annotated[bool, typer.Option("--curve", help="Measure the loss at many cache sizes; write no model.")]
CalibrationTextOption = Annotated[
    str | None,
    typer.Option(
        "--text", help="Calibration text: a file, a folder, or datasets:NAME. Default: a built-in mixture of texts."
    ),
]
JudgeTextOption = Annotated[
    str | None, typer.Option("--judge-text", help="Measure the loss on this text too. Best: text of another kind.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the bits of each layer, or the curve: .svg or .png."),
]
HealOption = Annotated[
    int, typer.Option("--heal", metavar="STEPS", min=0, help="Training steps of distillation from the original.")
]
HealTextOption = Annotated[
    str | None,
    typer.Option("--heal-text", metavar="TEXT", help="Training text of --heal. Default: the rest of --text."),
]
HealRateOption = Annotated[
    float | None,
    typer.Option(
        "--heal-rate",
        help="Learning rate of --heal. Default: 2e-4 for smaller heads, 3e-5 for a coded cache.",
    ),
]
HealTokensOption = Annotated[
    int | None,
    typer.Option(
        "--heal-tokens",
        min=1,
        help="Tokens per step of --heal. Default: one batch; for a coded cache on a GPU, 65,536, because what it still "
        "loses is small beside the noise of few tokens.",
    ),
]
WindowsOption = Annotated[int, typer.Option("--windows", min=2, help="Number of calibration windows.")]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length", min=2, help="Tokens per calibration window. Default: 1024, or the model's context if shorter."
    ),
]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Calibration windows per batch.")]
KeysOption = Annotated[
    KeysName | None,
    typer.Option(
        "--keys",
        help="What one transform mixes before coding. joint: keys and values; all: the keys of all heads; head: of one "
        "head; half: of its faster or slower rotary pairs; block: of 16 dimensions; pair: of a rotary pair; scale: "
        "nothing. More mixing loses less and decodes more slowly. Default: depends on the size of the model.",
    ),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="For images, sound or tokens of your own: a safetensors file, one row per sample; padding is left out.",
    ),
]
LayoutOption = Annotated[
    LayoutName,
    typer.Option(
        "--layout",
        help="With --keep-attention. slim: a size of its own for each head; stock: loads with plain transformers.",
    ),
]
MethodOption = Annotated[
    MethodName,
    typer.Option(
        "--method",
        help="With --keep-attention. knapsack: a size for each head; layer: for each layer; uniform: one for all.",
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option(
        "--step", min=1, help="With --keep-attention: sizes are multiples of this. Default: 1/16 of the head dimension."
    ),
]


def compress(
    model: ModelArgument,
    out: OutArgument = None,
    keep_kv: KeepKvOption = None,
    bits: BitsOption = None,
    max_loss: MaxLossOption = None,
    keep_attention: KeepAttentionOption = None,
    curve: CurveOption = False,
    text: CalibrationTextOption = None,
    judge_text: JudgeTextOption = None,
    plot: PlotOption = None,
    heal: HealOption = 0,
    heal_text: HealTextOption = None,
    heal_rate: HealRateOption = None,
    heal_tokens: HealTokensOption = None,
    windows: WindowsOption = 32,
    length: LengthOption = None,
    batch: BatchOption = None,
    keys: KeysOption = None,
    inputs: InputsOption = None,
    layout: LayoutOption = LayoutName.slim,
    method: MethodOption = MethodName.knapsack,
    step: StepOption = None,
    overwrite: Overwrite = False,
    json: Json = None,
    html: Html = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make the key-value cache smaller, at a measured loss.

    Keys and values are measured on calibration text. They are transformed so that equal errors in any two coordinates
    add the same loss, and stored with 0 to 8 bits per coordinate. The weights stay as they are. The result is not the
    same function: the loss on held-out text is measured and printed. With --keep-attention, heads become smaller
    instead: each keeps the dimensions that matter most. Use it for models without a cache, or with --layout stock for a
    checkpoint that plain transformers loads. To remove only what costs nothing, use `deadweight reduce`.

    If --heal is interrupted, the same command resumes it; its state is kept beside OUT, in a folder .OUT.healing-….

    \b
    deadweight compress MODEL --curve --judge-text book.txt     loss at many sizes, to choose one
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
    from deadweight.compress.run import compress as run

    refuse_odd_target(out, curve=curve)
    drawable(plot)
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    with progress_bar() as progress:
        result = run(model, out, progress=progress, **{n: getattr(v, "value", v) for n, v in options.items()})
    after = "" if out is None else f"\ndeadweight evaluate {quote(str(out))} --against {quote(model)}"
    deliver(result, after, report, page, plot)


def refuse_odd_target(out: Path | None, *, curve: bool) -> None:
    if out is None and not curve:
        raise DeadweightError("found no OUT to write the model to; expected one, or --curve to measure only")
    if out is not None and curve:
        raise DeadweightError("found OUT and --curve, which writes no model; expected one of them")


def deliver(
    result: Compression | CacheCompression, after: str, report: JsonReport, page: HtmlReport, plot: Path | None
) -> None:
    """Print and write the result, and the command to run after it; of several processes only the first does."""
    from deadweight.report.compression import as_data, plot_compression, print_compression
    from deadweight.train.launch import first_process

    def show(console: Console) -> None:
        print_compression(result, console)
        plain(f"\n{result.seconds:.0f} s{after}")

    if first_process():
        if plot is not None:
            plot_compression(result, plot)
        report.deliver(lambda: as_data(result), show)
        page.deliver(result)


OPTIONS = (
    "keep_kv", "bits", "max_loss", "keep_attention", "curve", "text", "judge_text", "heal", "heal_text", "heal_rate",
    "heal_tokens", "windows", "length", "batch", "keys", "inputs", "layout", "method", "step", "overwrite",
    "trust_remote_code",
)  # fmt: skip
