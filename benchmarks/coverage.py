"""How many of the model types that transformers registers get proofs, and why not the others.

python benchmarks/coverage.py                                  all causal LM types
python benchmarks/coverage.py --kind masked --kind base --json benchmarks/results/coverage.json
python benchmarks/coverage.py --types llama,gpt2 --narrow
python benchmarks/coverage.py --kind base --narrow --json benchmarks/results/coverage.json --redo nothing,crash,timeout
python benchmarks/coverage.py --read benchmarks/results/coverage.json --markdown docs/coverage.md

Each type's default config is cut to as few layers as show every kind of layer (widths stay) and built on the meta
device; where that does not run the config is taken whole, and a default that is incomplete is taken narrow. Then it
goes the way of every audit: open, trace, canonical form, search. A type without proofs falls back to evidence, the
gradients of its narrow clone. With --narrow the narrow clone is traced; there every claim is tested by evidence as
well, and biases without a gradient that no claim explains are listed. Where no clone runs, or none in time, the model
is taken at its own width, with as much time again.

A backbone of timm is replaced by a ResNet of transformers, unless timm is installed: then the record says of which
types it is a part (`pip install --no-deps --target SITE timm torchvision`, and SITE on PYTHONPATH). Attempts already in
the JSON file are kept: a run that was stopped goes on; --redo makes those of some results again (old: those of another
state of the code than --code names). Time is processor time.
"""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import importable_torchvision  # noqa: F401
import torch
import transformers
import typer
from coverage_evidence import examined
from coverage_report import Attempt, markdown, read, report, write
from coverage_words import PATH
from rich.console import Console
from rich.progress import track
from transformers.models.auto import modeling_auto as auto

from deadweight.audit.untraced_evidence import untraced_evidence
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import TraceError, trace
from deadweight.laws.catalogue import search
from deadweight.report import record
from deadweight.source.model import Source, open_model
from deadweight.source.narrow_clone import narrow, narrow_config, shallow_config
from deadweight.source.narrow_sizes import Size
from deadweight.source.printable import reason

KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "base": auto.MODEL_MAPPING_NAMES,
}
ARGUMENT = r"'\w+'"
CAUSES = {  # why a type is not audited: a pattern of the error, and the words for it
    r"requires the (\w+) library": "its code needs the {} library, which is not installed here",
    r"(it has no forward method[^;]*)": "{}",
    r"(its forward requires \w+, and the config does not say how to make an example of it)": "{}",
    rf"missing \d+ required positional arguments?: ({ARGUMENT}[^;…]*{ARGUMENT}|{ARGUMENT})(?!,? and '|, ')": (
        "its forward requires {}, of which no example is known"
    ),
    rf"missing \d+ required positional arguments?: ((?:{ARGUMENT}, )*{ARGUMENT})": (
        "its forward requires {} and more, of which no example is known"
    ),
    r"cannot be built from its config \((.*?)\); expected a complete": "its default config is incomplete ({})",
    r"(Could not find \w+) neither": "{} in transformers: the mapping names a class that does not exist",
}
GUARD = r"TraceError: GuardOnDataDependentSymNode: .*?(\(Size-like symbols: [^)]*\)|…|$)"
OWN_WIDTH = "at its own width"
NO_MEMORY = "can't allocate memory"
EXAMINING = 60  # seconds
MEMORY = 14 << 30  # bytes of address space: a type that wants more fails by itself and not with the machine


class Expired(BaseException):
    """Not an Exception, so that no handler on the way takes it for a model's refusal."""


def attempt(kind: str, model_type: str, *, as_narrow: bool = False) -> dict[str, Any]:
    """Open one type, trace it and search: the fields of an Attempt."""
    try:
        form, source = opened(kind, model_type)
        if as_narrow:
            form, source = narrowed(form, source)
    except Exception as error:  # noqa: BLE001 - a stranger's code: every failure is a result here
        return {"status": "nothing", "reason": in_words(reason(error))}
    form = with_libraries(form, source)
    try:
        graph = canonical(trace(source.module, source.args, source.kwargs))
        prover = search(graph)
        claims = Counter(claim.code for claim in prover.claims)
    except TraceError as error:
        return {**without_proof(source, reason(error)), "form": form}
    except Exception as error:  # noqa: BLE001 - our own bug, to be named and counted
        if NO_MEMORY in str(error):
            return {"status": "timeout", "reason": f"more than {MEMORY >> 30} GiB of memory", "form": form}
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{reason(error)} in {Path(where.filename).name}:{where.lineno} {where.name}"
        return {"status": "crash", "reason": why, "form": form}
    status = "proofs" if claims else "clean"
    result = {"status": status, "reason": "", "form": form, "nodes": len(graph.nodes), "claims": dict(claims)}
    return {**result, "unexplained": in_time(lambda: examined(prover, source))} if as_narrow else result


def with_libraries(form: str, source: Source) -> str:
    """The form, and whether layers of timm are part of the model: they are not part of transformers."""
    parts = {type(module).__module__.partition(".")[0] for module in source.module.modules()}
    return f"{form}, with timm {metadata.version('timm')}" if "timm" in parts else form


def in_time(examine: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What an examination says; that it took too long, if it did."""
    try:
        with deadline(EXAMINING):
            return examine()
    except Expired as error:
        return {"*": f"no evidence was taken: {error}"}
    except DeadweightError as error:
        return {"*": f"no evidence was taken: {error}"}


def narrowed(form: str, source: Source) -> tuple[str, Source]:
    """The narrow clone; the model at its own width where no clone runs."""
    try:
        return form, narrow(source)
    except DeadweightError:
        if source.refusal is not None:
            raise
        return f"{form}, {OWN_WIDTH}", source


def in_words(why: str) -> str:
    """The cause of a failure in words, where it is a known one; else the error."""
    why = PATH.sub("its config", why)
    for pattern, words in CAUSES.items():
        if match := re.search(pattern, why):
            return words.format(*match.groups())
    return f"cannot be built: {why}"


def without_proof(source: Source, why: str) -> dict[str, Any]:
    """What is left where torch.export fails: gradients, if the narrow clone runs."""
    try:
        unknown = list(untraced_evidence(source))
    except DeadweightError as error:  # what a user would read, in one line
        told = PATH.sub("its config", str(error))
        return {"status": "nothing", "reason": f"cannot be traced: {guarded(why)}; {told}"}
    except Exception as error:  # noqa: BLE001 - our own bug, to be named and counted
        return {"status": "crash", "reason": f"evidence without a graph: {reason(error)}"}
    refused = next((u.why for u in unknown if u.parameter == "*"), None)
    status, told = "nothing" if refused else "evidence", PATH.sub("its config", f"; {refused}" if refused else "")
    return {"status": status, "reason": f"cannot be traced: {guarded(why)}{told}"}


def guarded(why: str) -> str:
    """What torch.export says of a shape or a branch that depends on data, in words and without its symbols."""
    return re.sub(GUARD, "its code asks for a number that only the data say", why)


def forms(config: Any) -> dict[str, Callable[[], Any]]:
    """The forms of a default config, the one to prefer first."""
    return {
        "shallow": lambda: shallow_config(config),
        "shallow, each layer twice": lambda: shallow_config(config, repeat=2),
        "whole": lambda: config,
        "narrow and completed": lambda: narrow_config(config, Size()),
        "narrow, with rotary sections": lambda: narrow_config(config, Size(sections=True)),
        "shallow, with a ResNet as its backbone": lambda: shallow_config(with_resnet(config)),
    }


def with_resnet(config: Any) -> Any:
    """The config with a ResNet of transformers in place of a backbone that needs timm."""
    values = config.to_dict()
    backbone = values.get("backbone_config") or {}
    if backbone.get("model_type") != "timm_backbone":
        raise DeadweightError("found no backbone of timm; expected one to be replaced")
    stages = [f"stage{i}" for i in backbone.get("out_indices") or (4,)]
    resnet = transformers.ResNetConfig(out_features=stages).to_dict()
    return type(config).from_dict(values | {"backbone_config": resnet, "use_timm_backbone": False, "backbone": None})


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
        if source.refusal is None:
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
        return open_model(str(Path(folder) / "config.json"), collapsed=True)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise Expired in the block after so many seconds of processor time: others may use the machine as well."""

    def stop(signum: int, frame: Any) -> None:
        raise Expired(f"more than {seconds} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def attempt_in_time(kind: str, model_type: str, seconds: int, *, as_narrow: bool) -> dict[str, Any]:
    try:
        with deadline(seconds):
            return attempt(kind, model_type, as_narrow=as_narrow)
    except Expired as error:
        return {"status": "timeout", "reason": str(error)}


def timed(kind: str, model_type: str, seconds: int, as_narrow: bool) -> Attempt:
    start = time.process_time()
    result = attempt_in_time(kind, model_type, seconds, as_narrow=as_narrow)
    if as_narrow and result["status"] == "timeout":
        wide = attempt_in_time(kind, model_type, seconds, as_narrow=False)
        result = result if wide["status"] == "timeout" else wide | {"form": f"{wide.get('form', '')}, {OWN_WIDTH}"}
    gc.collect()
    return Attempt(kind, model_type, seconds=round(time.process_time() - start, 2), **result)


def main(
    kind: Annotated[list[str], typer.Option(help="causal, masked, seq2seq or base; repeatable.")] = ["causal"],  # noqa: B006
    types: Annotated[str, typer.Option(help="Only these types, separated by commas.")] = "",
    limit: Annotated[int, typer.Option(help="Largest number of types of each kind.")] = 10_000,
    seconds: Annotated[int, typer.Option(help="CPU seconds per type.")] = 60,
    as_narrow: Annotated[bool, typer.Option("--narrow", help="Trace narrow clones instead.")] = False,
    redo: Annotated[str, typer.Option(help="Run these results of the record again, separated by commas.")] = "",
    code: Annotated[str, typer.Option(help="The commit, for the record.")] = "",
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    setting: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "seconds": seconds,
        "narrow": as_narrow,
        "code": code,
    }
    if recorded is not None:
        setting, attempts = read(recorded)
    else:
        attempts = run(kind, types, limit, setting, json_file, redo)
    report(attempts, Console())
    if page is not None:
        page.write_text(markdown(attempts, setting), encoding="utf-8")


def run(
    kinds: list[str], types: str, limit: int, setting: dict[str, Any], json_file: Path | None, redo: str = ""
) -> list[Attempt]:
    wanted = set(types.split(",")) if types else None
    todo = [(k, t) for k in kinds for t in [t for t in KINDS[k] if not wanted or t in wanted][:limit]]
    if not todo:
        raise DeadweightError(f"no type of {', '.join(kinds)} is called {types}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    earlier, attempts = read(json_file) if json_file is not None and json_file.exists() else ({}, [])
    setting |= {"notes": earlier["notes"]} if "notes" in earlier else {}
    wanted_again = [a for a in attempts if a.status in redo.split(",") or ("old" in redo and a.code != setting["code"])]
    again = {(a.kind, a.type) for a in wanted_again} & set(todo)
    done = {(a.kind, a.type) for a in attempts} - again
    for kind, model_type in track([pair for pair in todo if pair not in done], description="proving"):
        latest = timed(kind, model_type, setting["seconds"], setting["narrow"])
        attempts = replaced(attempts, replace(latest, code=setting["code"]))
        if json_file is not None:
            write(json_file, setting, attempts)
    return attempts


def replaced(attempts: list[Attempt], new: Attempt) -> list[Attempt]:
    """The attempts with this one in its old place, or at the end."""
    places = [i for i, a in enumerate(attempts) if (a.kind, a.type) == (new.kind, new.type)]
    if not places:
        return [*attempts, new]
    return [*attempts[: places[0]], new, *attempts[places[0] + 1 :]]


if __name__ == "__main__":
    typer.run(main)
