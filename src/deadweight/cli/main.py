"""All subcommands together, and how errors are shown."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

import deadweight
from deadweight.cli import allocate, audit, compress, demo, evaluate, explain, reduce, saturation, sweep, train, verify
from deadweight.cli.progress_and_output import complain
from deadweight.cli.quiet import add_quiet
from deadweight.errors import DeadweightError
from deadweight.source.printable import reason

BAD_INPUT, INTERRUPTED = 2, 130
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
REQUIRED = {  # what pyproject.toml requires, by the names that are imported
    *("torch", "transformers", "safetensors", "numpy", "psutil", "yaml", "threadpoolctl", "tomli_w", "jaxtyping"),
    "jinja2",
    "markdown_it",
    "markupsafe",
}
PATIENT_COLLECTOR = (100_000, 50, 100)  # importing torch and tracing create millions of objects and little garbage
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Find the parameters of a transformer that cannot matter, and prove it.

    \b
    deadweight demo                 audit and reduce a small model that comes with the package
    deadweight audit demo           which parameters of this model are redundant, and why
    deadweight audit gpt2           a Hugging Face model, by its id or its folder
    deadweight explain key-bias     one law: what it says, why, an example, when it fails
    deadweight reduce demo OUT      remove what is redundant, and check that the function is the same
    deadweight verify demo OUT      are two checkpoints the same function?
    deadweight compress demo OUT    a smaller key-value cache or smaller heads, at a measured loss
    deadweight train OUT            a small GPT of any shape, with or without its query weights
    deadweight evaluate demo        perplexity, bits per byte, speed and cache size
    deadweight saturation demo      does the softmax of each head saturate as the context grows?
    deadweight allocate plan        how many heads, of what size, in which layer; ready to train
    """
    if version:
        typer.echo(f"deadweight {deadweight.__version__}")
        raise typer.Exit


app.command(short_help="List redundant parameters, with proofs.")(audit.audit)
app.command(short_help="Remove what is proved redundant, and write a checkpoint.")(reduce.reduce)
app.command(short_help="Check that two checkpoints are the same function.")(verify.verify)
app.command(short_help="Show one law, or list all of them.")(explain.explain)
app.command(short_help="Audit and reduce a small built-in model.")(demo.demo)
app.command(short_help="Make the key-value cache or the heads smaller, at a measured loss.")(compress.compress)
app.command(short_help="Train a small GPT of any shape.")(train.train)
app.command(short_help="Train a grid of variants and seeds.")(sweep.sweep)
app.command(short_help="Measure perplexity, bits per byte, speed and cache size.")(evaluate.evaluate)
app.add_typer(allocate.app, name="allocate", short_help="Choose the number and size of heads, layer by layer.")
app.command(short_help="Measure how attention saturates as the context grows.")(saturation.saturation)
add_quiet(app)
add_quiet(allocate.app)


def main() -> None:
    """Run the command. A user's mistake is one line on standard error and exit status 2, never a traceback."""
    sys.stdout, sys.stderr = sys.stdout or open_nowhere(), sys.stderr or open_nowhere()  # None where it is closed
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Greek letters still gets a report
    gc.set_threshold(*PATIENT_COLLECTOR)
    try:
        app(prog_name="deadweight")
    except DeadweightError as error:
        complain(str(error))
        sys.exit(BAD_INPUT)
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        complain(f"{error.name} is not installed, and this command needs it: pip install deadweight")
        sys.exit(BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        complain(f"not enough memory ({reason(error)}); expected a smaller model, input or batch, or more memory")
        sys.exit(BAD_INPUT)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        complain(f"a file or standard output cannot be written ({reason(error)}); expected room and permission")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again at the end
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def open_nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or one of torch's allocators had no memory left."""
    words = ("can't allocate memory", "out of memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
