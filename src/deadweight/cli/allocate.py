"""`deadweight allocate`: how many heads, of what size, in which layer."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deadweight.cli.options import Json, Plot
from deadweight.cli.progress_and_output import JsonReport, drawable, plain, progress_bar, writable
from deadweight.cli.quiet import is_quiet
from deadweight.errors import DeadweightError

if TYPE_CHECKING:
    from deadweight.allocate.pilot import PilotSettings
    from deadweight.allocate.plan import HeadPlan, UniformShape
    from deadweight.allocate.profile import Profile as LagProfile

Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="How much the next token depends on each lag: flat, power:EXPONENT, exponential:LAGS, FILE.csv "
        "(columns lag, norm), FILE.json, text:FILE (measured; text:embedded is Python's manual) or "
        "model:MODEL (its attention).",
    ),
]
Lags = Annotated[int | None, typer.Option("--lags", min=1, metavar="N", help="Number of lags in the profile.")]
TokenDim = Annotated[
    int | None,
    typer.Option("--token-dim", min=1, metavar="d", help="Dimension of a token. Default: as measured by the profile."),
]
Tokenizer = Annotated[
    str, typer.Option("--tokenizer", help="Tokenizer for text:FILE: bytes, bpe:SIZE, or a tokenizer.json.")
]
Multiple = Annotated[int, typer.Option("--multiple", min=1, help="Head dimensions are multiples of this.")]
Sharing = Annotated[
    int, typer.Option("--sharing", min=1, help="Query heads per key-value head (grouped-query attention).")
]
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


BudgetOption = Annotated[
    int, typer.Option("--budget", metavar="D", help="Width of the layer: Σ heads × head dimension.")
]
UseLagsOption = Annotated[
    int | None,
    typer.Option("--use-lags", min=1, metavar="M", help="Number of lags that get heads. Default: the best number."),
]
OneSizeOption = Annotated[bool, typer.Option("--one-size", help="All heads have the same dimension.")]
KvBytesOption = Annotated[
    float | None, typer.Option("--kv-bytes", help="Limit on cache bytes per token (2 bytes per number).")
]
FlopsOption = Annotated[
    float | None, typer.Option("--flops", help="Limit on FLOPs per token; needs --width, and uses --context.")
]
WidthOption = Annotated[
    int, typer.Option("--width", min=0, help="Width of the residual stream (d_model), for --flops.")
]
ContextOption = Annotated[int, typer.Option("--context", min=0, help="Tokens that a token attends to, for --flops.")]
EpsilonOption = Annotated[float, typer.Option("--epsilon", help="ε of the bound.")]


@app.command(short_help="One layer: the best heads for each lag, and the error bound by number of heads.")
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
    """Choose the number and dimension of heads for each lag that minimise the error bound within a budget.

    The bound of arXiv 2510.03784 limits the error of one attention layer: heads narrower than a token lose part of it,
    few heads resolve a lag poorly, and lags without heads are lost. The minimum over whole numbers is exact.

    \b
    deadweight allocate bound --budget 128 --token-dim 16
                                          one lag: the curve is lowest at 8 heads of 16
    deadweight allocate bound --budget 256 --token-dim 8 --lags 4
                                          a 4-gram: 8 heads of 8 for each of four lags
    deadweight allocate bound --budget 768 --profile text:book.txt --multiple 8 --one-size
                                          your text, head dimensions that are multiples of 8
    deadweight allocate bound --budget 512 --profile power:1.2 --token-dim 32 --kv-bytes 512 --sharing 4

    \b
    exit status: 0 done, 2 wrong usage, bad input, or nothing fits (the message says what would)
    """
    from deadweight.allocate.constraints import LayerBudget, Rules
    from deadweight.allocate.run import allocate
    from deadweight.report.allocation import bound_data, plot_bound, print_bound

    report, drawing = JsonReport(json), drawable(plot)
    limits = LayerBudget(budget, kv_bytes, flops, width, context)
    lag_profile = open_profile(profile, lags, tokenizer)
    rules = Rules(multiple, one_size, sharing, use_lags)
    optimum = allocate(lag_profile, limits, d_token=token_dim, rules=rules, epsilon=epsilon)
    source = lag_profile.source
    report.deliver(lambda: bound_data(optimum, source), lambda console: print_bound(optimum, source, console))
    if drawing is not None:
        plot_bound(optimum, source, drawing)


PlanWidthOption = Annotated[int, typer.Option("--width", min=1, help="Width of the residual stream (d_model).")]
LayersOption = Annotated[int, typer.Option("--layers", min=1, help="Number of layers.")]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Heads per layer of the model with equal heads.")]
PlanContextOption = Annotated[int, typer.Option("--context", min=2, help="Tokens per sequence.")]
SaturationOption = Annotated[
    str | None,
    typer.Option(
        "--saturation",
        metavar="FACTORS",
        help="Share of a token's dimensions that each layer's heads can use, 0 < factor ≤ 1. Numbers separated by "
        "commas, a JSON file with a list, a file of deadweight saturation --json, or the word pilot: train the model "
        "with equal heads for --pilot-steps on the text of the profile and measure it. Default: 1 in every layer.",
    ),
]
PilotStepsOption = Annotated[int, typer.Option("--pilot-steps", min=1, help="Training steps of --saturation pilot.")]
TomlOption = Annotated[
    str | None,
    typer.Option("--toml", metavar="FILE", help="Write the settings for deadweight train --config; - prints them."),
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
    """Choose heads and head dimension layer by layer, with as many attention parameters as equal heads have.

    Early layers take their shape from the error bound. A layer whose softmax saturates can use fewer dimensions of
    a token: its heads are smaller by its saturation factor, and the width that this saves pays for more heads in all
    layers. The heads of a layer have the same
    dimension, since the model has one d_qk and one d_v per layer.

    \b
    deadweight allocate plan                                        four layers, profile of Python's manual
    deadweight allocate plan --saturation 1,1,0.75,0.5 --toml plan.toml
    deadweight allocate plan --profile text:book.txt --saturation pilot --toml plan.toml
    deadweight train OUT --config plan.toml                         train the plan
    deadweight allocate plan --profile model:demo --width 768 --layers 12 --heads 12 --plot plan.svg

    \b
    exit status: 0 done, 2 wrong usage, bad input, or nothing fits (the message says what would)
    """
    from deadweight.allocate.constraints import Rules
    from deadweight.allocate.pilot import PilotSettings
    from deadweight.allocate.plan import UniformShape
    from deadweight.allocate.plan import plan as make_plan

    outputs = PlanOutputs(json, toml, plot)
    shape = UniformShape(width, layers, heads, context)
    text = profile.removeprefix("text:") if profile.startswith("text:") else None  # what is measured is trained on
    factors = None if saturation == "pilot" else given_saturation(saturation)
    lag_profile = open_profile(profile, lags, tokenizer)
    size, rules = token_dim or lag_profile.d_token, Rules(multiple=multiple, one_size=True, sharing=sharing)
    if saturation == "pilot":
        make_plan(shape, lag_profile.values, d_token=size, rules=rules)  # an impossible plan fails before the training
        factors = run_pilot(shape, PilotSettings(text or "embedded", tokenizer, pilot_steps, sharing=sharing))
    result = make_plan(shape, lag_profile.values, d_token=size, saturation=factors, rules=rules)
    outputs.deliver(result, lag_profile.source, {"text": text, "tokenizer": tokenizer} if text is not None else None)


class PlanOutputs:
    """Where a plan goes: a table or JSON, a TOML file for `deadweight train`, and a figure."""

    def __init__(self, json: str | None, toml: str | None, plot: Path | None) -> None:
        if json == "-" and toml == "-":
            raise DeadweightError("found --json - and --toml -; expected one of them on standard output")
        self.report, self.toml, self.drawing = JsonReport(json), writable(toml, "--toml"), drawable(plot)
        self.prints_toml = toml == "-"

    def deliver(self, plan: HeadPlan, source: str, data: dict[str, str] | None) -> None:
        from deadweight.allocate.plan_toml import plan_toml
        from deadweight.report.allocation import plan_data, plot_plan, print_plan

        settings = plan_toml(plan, data)
        if self.prints_toml:
            sys.stdout.write(settings)
        show = (lambda _: None) if self.prints_toml else lambda console: print_plan(plan, source, console)
        self.report.deliver(lambda: plan_data(plan, source), show)
        if self.toml is not None:
            self.toml.write_text(settings, encoding="utf-8")
        if self.drawing is not None:
            plot_plan(plan, source, self.drawing)


def open_profile(name: str, lags: int | None, tokenizer: str) -> LagProfile:
    from deadweight.allocate.profile import read_profile

    with progress_bar() as progress:
        return read_profile(name, lags, tokenizer, progress)


def run_pilot(shape: UniformShape, settings: PilotSettings) -> list[float]:
    """The saturation factors of a short run, which is named on standard error."""
    from deadweight.allocate.pilot import pilot

    with progress_bar() as progress:
        result = pilot(shape, settings, progress=progress)
    if not is_quiet():
        plain(result.source, stderr=True)
    return [round(factor, 4) for factor in result.factors]


def given_saturation(text: str | None) -> list[float] | None:
    """Numbers separated by commas, a JSON list in a file, or the factors in a file of `deadweight saturation`."""
    if text is None:
        return None
    try:
        values = (
            json_module.loads(Path(text).read_text(encoding="utf-8")) if text.endswith(".json") else text.split(",")
        )
        return [float(value) for value in (values.pop("factors") if isinstance(values, dict) else values)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DeadweightError(
            f"found --saturation {text!r}; expected numbers separated by commas, the word pilot, or a .json file with "
            "a list of numbers, or one that deadweight saturation --json wrote"
        ) from error
