"""`--quiet`, an option of every command: no progress and no notes; the result, errors and the exit status stay."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

import typer

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_HUB_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # transformers and huggingface_hub read it when they are imported

QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress; the result and errors are still printed.")
]


def is_quiet() -> bool:
    """Whether the command that runs was given --quiet."""
    return _QUIET.get()


def with_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option --quiet. Typer reads options from the signature, so the signature gets one more."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool = False, **options: Any) -> None:
        if quiet or not sys.stderr.isatty():
            os.environ.setdefault(_HUB_BARS, "1")
        token = _QUIET.set(quiet)
        try:
            command(*args, **options)
        finally:
            _QUIET.reset(token)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=QuietOption)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "quiet": QuietOption}
    return run


def add_quiet(app: typer.Typer) -> None:
    """Give every command of the app the option --quiet."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = with_quiet(command.callback)
