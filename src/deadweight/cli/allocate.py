"""`deadweight allocate`: how many heads, of what size, in which layer."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deadweight.cli.options import Json, Plot
from deadweight.cli.screen import JsonReport, drawable, plain, progress_bar, writable
from deadweight.errors import DeadweightError

if TYPE_CHECKING:
    from deadweight.allocate.plan import Plan

Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="How much depends on each lag: flat, power:EXPONENT, exponential:LAGS, FILE.csv (columns lag, norm), "
        "FILE.json, text:FILE (measured; text:embedded is Python's manual) or model:MODEL (its attention).",
    ),
]
Lags = Annotated[int | None, typer.Option("--lags", min=1, metavar="N", help="Length of the profile.")]
TokenDim = Annotated[
    int | None,
    typer.Option("--token-dim", min=1, metavar="d", help="Dimensions of a token; a measured profile brings its own."),
]
Tokenizer = Annotated[str, typer.Option("--tokenizer", help="For text:FILE. bytes, bpe:SIZE, or a tokenizer.json.")]
Multiple = Annotated[int, typer.Option("--multiple", min=1, help="Head sizes are multiples of this.")]
Sharing = Annotated[int, typer.Option("--sharing", min=1, help="Query heads per key-value head (grouped keys).")]
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def root() -> None:
    """How many heads, of what size, in which layer?

    \b
    deadweight allocate bound --budget 128 --token-dim 16      one layer: heads against their size
    deadweight allocate plan --profile text:embedded           a whole transformer, ready to train
    """


BudgetOption = Annotated[int, typer.Option("--budget", metavar="D", help="Σ heads × size.")]
UseLagsOption = Annotated[
    int | None, typer.Option("--use-lags", min=1, metavar="M", help="Exactly so many; default: the best number.")
]
OneSizeOption = Annotated[bool, typer.Option("--one-size", help="All heads have one size.")]
KvBytesOption = Annotated[
    float | None, typer.Option("--kv-bytes", help="At most so many bytes of cache per token (2 bytes a number).")
]
FlopsOption = Annotated[
    float | None, typer.Option("--flops", help="At most so many per token; needs --width, and --context counts.")
]
WidthOption = Annotated[int, typer.Option("--width", min=0, help="d_model, for --flops.")]
ContextOption = Annotated[int, typer.Option("--context", min=0, help="Tokens that a token sees, for --flops.")]
EpsilonOption = Annotated[float, typer.Option("--epsilon", help="ε of the bound.")]


@app.command(short_help="One layer: the best heads for each lag, and the curve.")
def bound(
    budget: BudgetOption,
    profile: Profile = "flat",
    lags: Lags = None,
    token_dim: TokenDim = None,
    tokenizer: Tokenizer = "bytes",
    use_lags: UseLagsOption = None,
    multiple: Multiple = 1,
    one_size: OneSizeOption = False,
    sharing: Sharing = 1,
    kv_bytes: KvBytesOption = None,
    flops: FlopsOption = None,
    width: WidthOption = 0,
    context: ContextOption = 0,
    epsilon: EpsilonOption = 0.0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """The heads and sizes for each lag that minimise the error bound within a budget, and the curve around them.

    The bound of arXiv 2510.03784 says what a layer of attention may get wrong: heads narrower than a token cut
    something off, few heads look at a lag badly, and lags without heads are lost. Its minimum over whole numbers is
    found exactly.

    \b
    deadweight allocate bound --budget 128 --token-dim 16
                                          one lag: the curve is lowest at 8 heads of 16
    deadweight allocate bound --budget 256 --token-dim 8 --lags 4
                                          a 4-gram: 8 heads of 8 for each of four lags
    deadweight allocate bound --budget 768 --profile text:book.txt --multiple 8 --one-size
                                          your text, sizes that hardware likes
    deadweight allocate bound --budget 512 --profile power:1.2 --token-dim 32 --kv-bytes 512 --sharing 4

    \b
    exit status: 0 done, 2 wrong usage, bad input, or nothing fits (the message says what would)
    """
    from deadweight.allocate.rules import Budget, Rules
    from deadweight.allocate.run import allocate
    from deadweight.report.allocation import bound_data, plot_bound, print_bound

    report, drawing = JsonReport(json), drawable(plot)
    limits = Budget(budget, kv_bytes, flops, width, context)
    found_profile = named_profile(profile, lags, tokenizer)
    rules = Rules(multiple, one_size, sharing, use_lags)
    optimum = allocate(found_profile, limits, d_token=token_dim, rules=rules, epsilon=epsilon)
    source = found_profile.source
    report.deliver(lambda: bound_data(optimum, source), lambda console: print_bound(optimum, source, console))
    if drawing is not None:
        plot_bound(optimum, source, drawing)


PlanWidthOption = Annotated[int, typer.Option("--width", min=1, help="d_model.")]
LayersOption = Annotated[int, typer.Option("--layers", min=1, help="Number of layers.")]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Per layer, of the default with equal heads.")]
PlanContextOption = Annotated[int, typer.Option("--context", min=2, help="Tokens per sequence.")]
SaturationOption = Annotated[
    str | None,
    typer.Option(
        "--saturation",
        metavar="FACTORS",
        help="What each layer's heads can still use of a token, 0 < factor ≤ 1: by comma, a JSON list in a file, "
        "what deadweight saturation --json wrote, or the word pilot: the default is trained for a while on the "
        "text of the profile, and measured. Default: 1 everywhere.",
    ),
]
PilotStepsOption = Annotated[int, typer.Option("--pilot-steps", min=1, help="Steps of that pilot run.")]
TomlOption = Annotated[
    str | None, typer.Option("--toml", metavar="FILE", help="Write the run for deadweight train; - prints it.")
]


@app.command(short_help="A whole transformer, layer by layer, ready to train.")
def plan(
    profile: Profile = "text:embedded",
    lags: Lags = None,
    token_dim: TokenDim = None,
    tokenizer: Tokenizer = "bytes",
    width: PlanWidthOption = 128,
    layers: LayersOption = 4,
    heads: HeadsOption = 4,
    context: PlanContextOption = 128,
    saturation: SaturationOption = None,
    pilot_steps: PilotStepsOption = 300,
    multiple: Multiple = 8,
    sharing: Sharing = 1,
    json: Json = None,
    toml: TomlOption = None,
    plot: Plot = None,
) -> None:
    """Heads and their size by layer, with the attention parameters of equal heads everywhere.

    Early layers take their shape from the bound. A layer whose softmax saturates uses less of a token: its heads are
    smaller by its factor, and what that frees buys heads in all layers. Heads of one layer have one size, since the
    model has one d_qk and one d_v per layer.

    \b
    deadweight allocate plan                                        four layers, profile of Python's manual
    deadweight allocate plan --saturation 1,1,0.75,0.5 --toml plan.toml
    deadweight allocate plan --profile text:book.txt --saturation pilot --toml plan.toml
    deadweight train OUT --config plan.toml                         train it as it is
    deadweight allocate plan --profile model:demo --width 768 --layers 12 --heads 12 --plot plan.svg

    \b
    exit status: 0 done, 2 wrong usage, bad input, or nothing fits (the message says what would)
    """
    from deadweight.allocate.plan import Shape
    from deadweight.allocate.plan import plan as make_plan
    from deadweight.allocate.rules import Rules
    from deadweight.allocate.toml import plan_toml
    from deadweight.report.allocation import plot_plan

    if json == "-" and toml == "-":
        raise DeadweightError("found --json - and --toml -; expected one of them on standard output")
    report, run_file, drawing = JsonReport(json), writable(toml, "--toml"), drawable(plot)
    shape = Shape(width, layers, heads, context)
    text = profile.removeprefix("text:") if profile.startswith("text:") else None  # what is measured is trained on
    factors = None if saturation == "pilot" else given_saturation(saturation)
    known = named_profile(profile, lags, tokenizer)
    size, rules = token_dim or known.d_token, Rules(multiple=multiple, one_size=True, sharing=sharing)
    if saturation == "pilot":
        make_plan(shape, known.values, d_token=size, rules=rules)  # what cannot be is said before the training
        factors = piloted(shape, text or "embedded", tokenizer, pilot_steps, sharing)
    result = make_plan(shape, known.values, d_token=size, saturation=factors, rules=rules)
    written = plan_toml(result, {"text": text, "tokenizer": tokenizer} if text is not None else None)
    deliver_plan(report, result, known.source, written if toml == "-" else None)
    if run_file is not None:
        run_file.write_text(written, encoding="utf-8")
    if drawing is not None:
        plot_plan(result, known.source, drawing)


def deliver_plan(report: JsonReport, result: Plan, source: str, toml: str | None) -> None:
    """The plan as JSON, as a table, or as TOML on standard output."""
    from deadweight.report.allocation import plan_data, print_plan

    if toml is not None:
        sys.stdout.write(toml)
    report.deliver(
        lambda: plan_data(result, source),
        lambda console: None if toml is not None else print_plan(result, source, console),
    )


def named_profile(name: str, lags: int | None, tokenizer: str) -> Any:
    from deadweight.allocate.profile import read_profile

    with progress_bar() as progress:
        return read_profile(name, lags, tokenizer, progress)


def piloted(shape: Any, text: str, tokenizer: str, steps: int, sharing: int) -> list[float]:
    """The factors that a short run shows, told on standard error."""
    from deadweight.allocate.pilot import pilot

    with progress_bar() as progress:
        factors = pilot(shape, text, tokenizer=tokenizer, steps=steps, sharing=sharing, progress=progress)
    plain(factors.source, stderr=True)
    return [round(f, 4) for f in factors.factors]


def given_saturation(text: str | None) -> list[float] | None:
    """Numbers by comma, a JSON list in a file, or the factors in a file of `deadweight saturation`."""
    if text is None:
        return None
    try:
        values = (
            json_module.loads(Path(text).read_text(encoding="utf-8")) if text.endswith(".json") else text.split(",")
        )
        return [float(value) for value in (values["factors"] if isinstance(values, dict) else values)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DeadweightError(
            f"found --saturation {text!r}; expected numbers by comma, the word pilot, or a .json file: a list of "
            "them, or what deadweight saturation --json wrote"
        ) from error
