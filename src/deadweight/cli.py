"""The `deadweight` command: each subcommand calls one function of the library and prints what it returns."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import deadweight
from deadweight import cli_allocate, cli_compress, cli_saturation, cli_train
from deadweight.cli_parts import LayoutName
from deadweight.errors import DeadweightError
from deadweight.report.json_report import as_text, json_text
from deadweight.report.pages import find_page, law_codes
from deadweight.report.terminal import make_console, print_audit, print_laws, print_page
from deadweight.report.text import one_line, printable

FOUND, DIFFERENT, BAD_INPUT, INTERRUPTED = 1, 1, 2, 130
PATIENT_COLLECTOR = (100_000, 50, 100)  # importing torch and tracing make millions of objects and hardly any garbage

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Output(StrEnum):
    """What of the model's output has to stay the same."""

    logits = "logits"
    probabilities = "probabilities"


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Find the parameters of a transformer that cannot matter, and prove it.

    \b
    deadweight demo                 a first look, on a small model that comes with the package
    deadweight audit demo           the same model, audited with every option at hand
    deadweight audit gpt2           a Hugging Face model, by its id or its folder
    deadweight explain key-bias     one of the laws: what, why, example, when it fails
    deadweight reduce demo OUT      take out what is redundant, and check that nothing changed
    deadweight verify demo OUT      are two checkpoints the same function?
    deadweight compress demo OUT    smaller heads and a smaller cache, at a measured loss
    deadweight train OUT            a small GPT of any shape, with or without its query weights
    deadweight evaluate demo        perplexity, bits per byte, speed, cache
    deadweight saturation demo      does the softmax of each head saturate as the context grows?
    deadweight allocate plan        how many heads, of what size, in which layer; ready to train
    """
    if version:
        typer.echo(f"deadweight {deadweight.__version__}")
        raise typer.Exit


@app.command(short_help="Which parameters are redundant, and why.")
def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder or hub id, a config.json (no weights needed), a .gguf file, "
            "package.module:callable, or the word demo.",
        ),
    ],
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is standard output.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Audit the model in training mode.")] = False,
    output: Annotated[Output, typer.Option("--output", help="Which output must not change.")] = Output.logits,
    complete: Annotated[
        bool, typer.Option("--complete", help="Count all redundancy on a narrow clone and compare with the laws.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="For CI: exit with 1 if a parameter is dead or folds, with 2 if nothing was audited."
        ),
    ] = False,
    gauges: Annotated[
        bool, typer.Option("--gauges", help="With --check: gauges, which every transformer has, count too.")
    ] = False,
    select: Annotated[
        list[str] | None, typer.Option("--select", metavar="DW…", help="Only these laws: codes or names, by comma.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="DW…", help="All but these laws: codes or names, by comma.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's repository run its own Python code.")
    ] = False,
    proofs: Annotated[bool, typer.Option("--proofs", help="Print one proof for every row of the table.")] = False,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", min=2, help="Sequence length of the example inputs.")
    ] = None,
) -> None:
    """Say which parameters of MODEL are redundant, with proofs, and what stays unknown.

    \b
    deadweight audit demo --proofs              every law with one of its proofs
    deadweight audit demo --complete            does anything redundant escape the laws?
    deadweight audit demo --json -              the same facts, for a program
    deadweight audit ./config.json              no weights needed: architecture alone decides
    deadweight audit mypkg.model:build --check --select key-bias,value-bias
                                                fail a build that wastes these

    \b
    exit status: 0 done, 1 --check found something, 2 wrong usage, bad input, or a model that could not be audited
    """
    destination = None if json in (None, "-") else _writable(Path(str(json)))
    options: dict[str, Any] = {
        "training": training,
        "output": output.value,
        "complete": complete,
        "select": law_codes(select or []),
        "ignore": law_codes(ignore or []),
        "trust_remote_code": trust_remote_code,
        "length": length,
    }
    with spinner() as progress:
        result = deadweight.audit(model, progress=progress, **options)
    if json == "-":
        sys.stdout.write(json_text(result))
    else:
        print_audit(result, make_console(), proofs=proofs)
    if destination is not None:
        destination.write_text(json_text(result), encoding="utf-8")
    if check and any(f.counts(gauges=gauges) for f in result.findings):
        raise typer.Exit(FOUND)
    if result.unaudited is not None and (check or not result.findings):
        raise DeadweightError(f"{printable(result.model)} could not be audited: {printable(result.unaudited)}")


@app.command(short_help="Take out exactly what was proved, and write a checkpoint.")
def reduce(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for audit, with its weights.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The folder to write; not needed with --dry-run.")
    ] = None,
    layout: Annotated[
        LayoutName,
        typer.Option("--layout", help="slim: really smaller. stock: same shapes, loads with plain transformers."),
    ] = LayoutName.slim,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write plan and results as JSON; - is standard output.")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option("--select", metavar="DW…", help="Only these laws: codes or names, by comma.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="DW…", help="All but these laws: codes or names, by comma.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's repository run its own Python code.")
    ] = False,
) -> None:
    """Take out of MODEL what is provably redundant, and write the result to OUT.

    The reduced model is compared with the original in float64 and in its own precision before OUT appears. A rewrite
    that would cost more than three times the model's own rounding noise is left out, and the report says so.

    \b
    deadweight reduce demo --dry-run            what would be done, what it saves, and why the rest is not done
    deadweight reduce demo OUT                  really smaller; loads with deadweight.load or trust_remote_code
    deadweight reduce demo OUT --layout stock   the same class and shapes: loads with plain transformers
    deadweight reduce demo OUT --select key-bias,value-bias

    \b
    exit status: 0 done, 1 the result would not be the same function (nothing is written), 2 wrong usage or bad input
    """
    if out is None and not dry_run:
        raise DeadweightError("no OUT to write to; expected a folder, or --dry-run")
    destination = None if json in (None, "-") else _writable(Path(str(json)))
    from deadweight.reduce.verify import DifferentError
    from deadweight.report.reduction import print_reduction
    from deadweight.save.manifest import manifest

    options: dict[str, Any] = {
        "layout": layout.value,
        "dry_run": dry_run,
        "select": law_codes(select or []),
        "ignore": law_codes(ignore or []),
        "overwrite": overwrite,
        "trust_remote_code": trust_remote_code,
    }
    with spinner() as progress:
        try:
            result = deadweight.reduce(model, out, progress=progress, **options)
        except DifferentError as error:
            _complain(str(error))
            raise typer.Exit(DIFFERENT) from error
    text = as_text(manifest(result))
    if json == "-":
        sys.stdout.write(text)
    else:
        print_reduction(result, make_console())
    if destination is not None:
        destination.write_text(text, encoding="utf-8")


@app.command(short_help="Are two checkpoints the same function?")
def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="The original.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the errors as JSON; - is standard output.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the models' repositories run their own Python code.")
    ] = False,
) -> None:
    """Compare B with A, whoever made them: in float64, and in their own precision against A's own rounding noise.

    \b
    deadweight verify demo OUT
    deadweight verify ./original ./fused --json -

    \b
    exit status: 0 the same function, 1 different, 2 wrong usage or bad input
    """
    destination = None if json in (None, "-") else _writable(Path(str(json)))
    from deadweight.report.reduction import print_verification
    from deadweight.save.manifest import verification_data

    with spinner() as progress:
        result = deadweight.verify(a, b, trust_remote_code=trust_remote_code, progress=progress)
    text = as_text(verification_data(result))
    if json == "-":
        sys.stdout.write(text)
    else:
        print_verification(result, make_console())
    if destination is not None:
        destination.write_text(text, encoding="utf-8")
    if not result.same:
        raise typer.Exit(DIFFERENT)


@app.command(short_help="One law, or all of them.")
def explain(
    law: Annotated[
        str | None, typer.Argument(metavar="[LAW]", help="A code or a name; all laws are listed without one.")
    ] = None,
) -> None:
    """Show one law: what it says, why it is true, an example, when it fails, how safe it is.

    \b
    deadweight explain              all laws, one line each
    deadweight explain DW002        one law by its code
    deadweight explain key-bias     the same law by its name
    """
    console = make_console()
    if law is None:
        print_laws(console)
    else:
        print_page(find_page(law), console)


@app.command(short_help="A first look, offline, in seconds.")
def demo() -> None:
    """Audit the small trained model that comes with the package, reduce it, and check the result: offline.

    \b
    deadweight demo
    """
    import tempfile

    from deadweight.report.reduction import print_reduction

    console = make_console()
    with spinner() as progress:
        result = deadweight.audit("demo", progress=progress)
    print_audit(result, console, proofs=True)
    with tempfile.TemporaryDirectory() as folder:
        with spinner() as progress:
            reduction = deadweight.reduce("demo", Path(folder) / "slim", progress=progress)
        print_reduction(reduction, console)
    console.print(Text(_AFTER_DEMO))


cli_compress.register(app)
cli_train.register(app)
cli_allocate.register(app)
cli_saturation.register(app)

_AFTER_DEMO = """
That was a model that comes with deadweight. Now try
  deadweight audit demo --complete     count every redundant dimension and see whether a law explains it
  deadweight explain key-bias          read one law, with its proof and its limits
  deadweight reduce demo OUT           write the smaller model, and read OUT/README.md
  deadweight audit YOUR_MODEL          a folder, a hub id, a config.json, a .gguf, or package.module:callable
"""


def main() -> None:
    """Run the command. A user's mistake is one line on standard error and exit status 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Greek letters still gets a report
    gc.set_threshold(*PATIENT_COLLECTOR)
    try:
        app(prog_name="deadweight")
    except DeadweightError as error:
        _complain(str(error))
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _complain(message: str) -> None:
    line = Text.assemble(("error: ", "bold red"), one_line(message))
    make_console(stderr=True).print(line, soft_wrap=True)


def _writable(file: Path) -> Path:
    """Fail before the audit, not after it, if its report has nowhere to go."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        found = "it is a folder" if file.is_dir() else f"the folder {str(file.absolute().parent)!r} does not exist"
        raise DeadweightError(f"cannot write --json {str(file)!r}: {found}; name a file in an existing folder, or -")
    return file


@contextmanager
def spinner() -> Iterator[Callable[[str], None] | None]:
    """What the audit is doing, on standard error while it does it, if a person is looking; otherwise nothing."""
    console: Console = make_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status(Text("auditing")) as status:
        yield lambda message: status.update(Text(one_line(message)))


if __name__ == "__main__":
    main()
