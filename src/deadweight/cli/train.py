"""`deadweight train`: a small GPT of any shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from deadweight.cli.options import Json
from deadweight.cli.progress_and_output import JsonReport, counting_bar, plain
from deadweight.cli.quiet import is_quiet
from deadweight.errors import DeadweightError
from deadweight.report.audit_terminal import make_console
from deadweight.source.type_aliases import Setting

if TYPE_CHECKING:  # help imports nothing that it does not show
    from deadweight.train import Listener, Run, Trained, Update
    from deadweight.train.settings import Table

START = {"d_model": 128, "n_layers": 4, "heads": 4, "context": 128}  # learns something in two minutes on a laptop
START_TRAIN = {"batch": 16, "learning_rate": 2e-3, "steps": 600}


OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder to write. An interrupted run in it is resumed.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with the tables [model], [data] and [train].")
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", help="Training text: a file (also .gz, .bz2, .xz), a folder, datasets:NAME, or embedded."),
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="bytes, bpe:SIZE (trained on the text), or a tokenizer.json.")
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Sequences per step, all processes together.")]
ContextOption = Annotated[int | None, typer.Option("--context", help="Tokens per sequence.")]
WidthOption = Annotated[int | None, typer.Option("--width", help="Width of the residual stream (d_model).")]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Number of layers.")]
HeadsOption = Annotated[int | None, typer.Option("--heads", help="Heads per layer.")]
QueryOption = Annotated[
    str | None,
    typer.Option(
        "--query",
        help="Query projection: full, or identity (no query weights). Keys and values: --set model.key=identity.",
    ),
]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="Peak learning rate, after the warm-up.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the initial weights and of the batches.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other setting. May be given several times."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in OUT, if there is one.")]


def train(
    out: OutArgument,
    config: ConfigOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    steps: StepsOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    width: WidthOption = None,
    layers: LayersOption = None,
    heads: HeadsOption = None,
    query: QueryOption = None,
    learning_rate: LearningRateOption = None,
    seed: SeedOption = None,
    settings: SettingsOption = None,
    overwrite: OverwriteOption = False,
    json: Json = None,
) -> None:
    """Train a small GPT of any shape. Without options: four layers on Python's manual, two minutes on a CPU.

    OUT becomes a Hugging Face folder that audit, reduce, evaluate and AutoModelForCausalLM read. It also holds
    run.toml (the settings), metrics.jsonl (one line per measurement), trained.json (the result) and state/ (the last
    checkpoint). The same command resumes a run that was interrupted, and leaves a finished one as it is.

    \b
    deadweight train OUT                                     a first model
    deadweight train OUT --text book.txt --steps 2000        your text
    deadweight train OUT --query identity                    without query weights
    deadweight train OUT --config run.toml                   all settings from a file
    deadweight train OUT --set model.causal=false            an encoder, with masked tokens
    deadweight train OUT --set train.optimizer=muon          orthogonal updates for the matrices of the layers
    deadweight train OUT --set model.biases='["query","value"]' --set train.weight_decay=0.03
    torchrun --nproc-per-node 8 -m deadweight train OUT --config run.toml
                                                             many GPUs; accelerate launch works too

    \b
    exit status: 0 done; 2 wrong usage, bad input, or a loss that became NaN or infinite
    """
    report = JsonReport(json)
    data: Table = {"text": text, "tokenizer": tokenizer}
    model: Table = {"context": context, "d_model": width, "n_layers": layers, "heads": heads, "query": query}
    training: Table = {"steps": steps, "batch": batch, "learning_rate": learning_rate, "seed": seed}
    flags = {"data": data, "train": training, "model": model}
    run = make_settings(config, flags, settings or [])
    from deadweight.train.launch import exit_if_launched, finished_run, first_process

    result = finished_run(out.expanduser(), run, overwrite=overwrite) or run_training(run, out, overwrite=overwrite)
    if first_process():
        report.deliver(lambda: {**asdict(result), "out": str(result.out)}, lambda _: show(result))
    if not result.finished_before:
        exit_if_launched()


def run_training(run: Run, out: Path, *, overwrite: bool) -> Trained:
    from deadweight.train.loop import train as train_model  # imports torch: mistakes are reported before

    with training_bar(run.train.steps) as listener:
        return train_model(run, out, overwrite=overwrite, listener=listener)


def make_settings(config: Path | None, flags: dict[str, Table], settings: list[str]) -> Run:
    """The tables of a file, or of a small run; flags change them, and --set changes them after that."""
    from deadweight.train.settings import make_run, read_toml

    tables = read_toml(config) if config is not None else {"model": dict(START), "train": dict(START_TRAIN)}
    for table, values in flags.items():
        for key, value in values.items():
            if value is not None:
                put(tables, f"{table}.{key}", value)
    for setting in settings:
        put(tables, *parse_setting(setting))
    return make_run(tables, where="" if config is None else f"{config}: ")


def show(result: Trained) -> None:
    if result.finished_before:
        plain(f"{result.out} is finished: {result.steps:,} steps done, 0 steps left. --overwrite trains it again.\n")
    plain(
        f"{result.parameters:,} parameters, {result.tokens:,} tokens in {result.seconds:.0f} s: "
        f"{result.bits_per_byte:.3f} bits per byte on the validation text\n\n"
        f"deadweight evaluate {quote(str(result.out))} --text FILE\ndeadweight audit {quote(str(result.out))}"
    )


def put(tables: Table, key: str, value: Setting) -> None:
    """Set TABLE.KEY."""
    table, _, name = key.partition(".")
    if not isinstance(tables.setdefault(table, {}), dict):
        raise DeadweightError(f"found {table} = {tables[table]!r}; expected a table [{table}]")
    tables[table][name] = value


def parse_setting(setting: str) -> tuple[str, Setting]:
    """TABLE.KEY=VALUE, the value as TOML writes it; a bare word is text."""
    import tomllib

    key, equals, value = setting.partition("=")
    if not equals or "." not in key:
        raise DeadweightError(f"found --set {setting!r}; expected TABLE.KEY=VALUE, as in train.weight_decay=0.03")
    try:
        return key.strip(), *tomllib.loads(f"value = {value}").values()
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


@contextmanager
def training_bar(steps: int) -> Iterator[Listener]:
    """Loss, speed and time left, on standard error; one line per measurement where that is no terminal."""
    from deadweight.train.result import Listener

    console = make_console(stderr=True)
    if is_quiet():
        yield Listener()
        return
    if not console.is_terminal:
        yield Listener(lambda update: console.print(as_line(update), markup=False, highlight=False, soft_wrap=True))
        return
    with counting_bar(console) as bar:
        task = bar.add_task("starting", total=steps)

        def tell(update: Update) -> None:
            bar.update(task, completed=update.step, description=as_line(update))
            if update.valid_loss is not None:
                bar.console.print(as_line(update), markup=False, highlight=False)

        def progress(stage: str, done: int = 0, total: int = 0, /) -> None:
            bar.update(task, description=stage)

        yield Listener(tell, progress)


def as_line(update: Update) -> str:
    if update.valid_loss is not None:
        return f"step {update.step}: {update.bits_per_byte:.3f} bits per byte on the validation text"
    return f"step {update.step}: loss {update.loss:.3f}, {update.tokens_per_second:,.0f} tokens/s"
