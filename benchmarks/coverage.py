"""How many of the model types that transformers registers can be opened and traced, and why not the others.

python benchmarks/coverage.py                       all causal LM types
python benchmarks/coverage.py --kind masked --kind base --json coverage.json
python benchmarks/coverage.py --types llama,gpt2 --narrow

Each type's default config is cut to as few layers as show every kind of layer (widths stay) and built on the meta
device; where that does not run the config is taken whole, and a default that is incomplete is taken narrow.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from transformers.models.auto import modeling_auto as auto

from deadweight.errors import DeadweightError
from deadweight.source import Source, open_model
from deadweight.source.model import REFUSED
from deadweight.source.narrow import narrow, narrow_config, shallow_config
from deadweight.source.table import Size
from deadweight.source.text import reason

KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "base": auto.MODEL_MAPPING_NAMES,
}
FAILED = ("unbuilt", "untraced", "timeout")


class Expired(BaseException):
    """Not an Exception, so that no handler on the way takes it for a model's refusal."""


@dataclass(frozen=True)
class Attempt:
    """What became of one type."""

    kind: str
    type: str
    status: str  # traced, or one of FAILED
    reason: str
    seconds: float


def trace(source: Source) -> str:
    """Trace the model; what to say about it when it worked."""
    program = torch.export.export(source.module, source.args, source.kwargs, strict=False)
    return f"{len(program.graph.nodes)} nodes"


def attempt(kind: str, model_type: str, *, as_narrow: bool = False) -> tuple[str, str]:
    """Open one type and trace it: (status, reason)."""
    try:
        form, source = opened(kind, model_type)
        source = narrow(source) if as_narrow else source
    except Exception as error:  # noqa: BLE001 - a stranger's code: every failure is a result here
        return "unbuilt", reason(error)
    try:
        return "traced", f"{form}: {trace(source)}"
    except Exception as error:  # noqa: BLE001 - likewise
        return "untraced", f"{form}: {reason(error)}"


def forms(config: Any) -> dict[str, Callable[[], Any]]:
    """The forms of a default config, the one to prefer first."""
    return {
        "shallow": lambda: shallow_config(config),
        "shallow, each layer twice": lambda: shallow_config(config, repeat=2),
        "whole": lambda: config,
        "narrow and completed": lambda: narrow_config(config, Size()),
    }


def opened(kind: str, model_type: str) -> tuple[str, Source]:
    """The first form of the type's default config that runs, opened as a user would; or one that opens at least."""
    config = transformers.CONFIG_MAPPING[model_type]()
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    silent: list[tuple[str, Source]] = []
    refusals: list[Exception] = []
    for form, make in forms(config).items():
        try:
            source = _open(make(), _class_name(kind, model_type))
        except Exception as error:  # noqa: BLE001 - try the next form
            refusals.append(error)
            continue
        if not any(note.startswith(REFUSED) for note in source.notes):
            return form, source
        silent.append((form, source))
    if silent:
        return silent[0]
    raise refusals[0]


def _class_name(kind: str, model_type: str) -> str:
    name = KINDS[kind][model_type]
    return name if isinstance(name, str) else name[0]


def _open(config: Any, class_name: str) -> Source:
    config.architectures = [class_name]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return open_model(str(Path(folder) / "config.json"))


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise Expired in the block after so many seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise Expired(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def timed(kind: str, model_type: str, seconds: int, as_narrow: bool) -> Attempt:
    start = time.monotonic()
    try:
        with deadline(seconds):
            status, why = attempt(kind, model_type, as_narrow=as_narrow)
    except Expired as error:
        status, why = "timeout", str(error)
    return Attempt(kind, model_type, status, why, round(time.monotonic() - start, 2))


def report(attempts: list[Attempt], console: Console) -> None:
    """Counts by kind, then the failures, grouped by their reason."""
    for kind in dict.fromkeys(a.kind for a in attempts):
        mine = [a for a in attempts if a.kind == kind]
        traced = [a for a in mine if a.status == "traced"]
        completed = sum(a.reason.startswith("narrow") for a in traced)
        console.print(f"[bold]{kind}[/bold]: {len(traced)} of {len(mine)} types trace ({completed} of them only narrow")
        console.print("  and with settings that their default config leaves out)")
        groups: dict[str, list[str]] = defaultdict(list)
        for failed in (a for a in mine if a.status in FAILED):
            groups[f"{failed.status}: {failed.reason}"].append(failed.type)
        for why, types in sorted(groups.items(), key=lambda item: -len(item[1])):
            console.print(f"  {len(types):3} {', '.join(types)}\n      {why}", markup=False, highlight=False)


def main(
    kind: Annotated[list[str], typer.Option(help="causal, masked, seq2seq or base; may be repeated")] = ["causal"],  # noqa: B006
    types: Annotated[str, typer.Option(help="only these types, comma-separated")] = "",
    limit: Annotated[int, typer.Option(help="at most so many types of each kind")] = 10_000,
    seconds: Annotated[int, typer.Option(help="for each type")] = 120,
    as_narrow: Annotated[bool, typer.Option("--narrow", help="trace narrow clones instead")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every attempt here")] = None,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    wanted = set(types.split(",")) if types else None
    todo = [(k, t) for k in kind for t in [t for t in KINDS[k] if not wanted or t in wanted][:limit]]
    if not todo:
        raise DeadweightError(f"no type of {', '.join(kind)} is called {types}")
    attempts = [timed(k, t, seconds, as_narrow) for k, t in track(todo, description="tracing")]
    report(attempts, Console())
    if json_file:
        json_file.write_text(json.dumps([asdict(a) for a in attempts], indent=1))


if __name__ == "__main__":
    typer.run(main)
