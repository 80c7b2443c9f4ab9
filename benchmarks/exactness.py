"""Which tools change a model's function, and which really remove parameters: deadweight and tools in common use.

python benchmarks/exactness.py --tool transformer-lens=VENV/bin/python --tool transformer-tricks=VENV/bin/python \\
    --tool llmcompressor=VENV/bin/python --json benchmarks/results/exactness.json --markdown docs/exactness.md
python benchmarks/exactness.py --read benchmarks/results/exactness.json --markdown docs/exactness.md

One run, the same folders of weights for everyone. Each tool works in a process and an environment of its own, through
a small script in benchmarks/adapters, as its documentation says; a tool without an interpreter is "not run". Every
error is against the original model in float64: ‖found − truth‖ / ‖truth‖. The noise floor is the original's own error
in float32. Parameters are counted in the files, before and after: a number that was set to zero is still there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from exactness_models import (
    PRECISIONS,
    Model,
    builders,
    error,
    first_line,
    hugging_class,
    log_error,
    output_of,
    written,
)
from exactness_report import Loading, Row, from_json, markdown
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deadweight.report import record

ADAPTERS = Path(__file__).parent / "adapters"
HERE = "deadweight"  # this interpreter
BASE = ("deadweight", "torch", "transformers")
ONE_AT_A_TIME = threading.Lock()  # transformers sets global state while it loads


@dataclass(frozen=True)
class Tool:
    """One way to change weights."""

    name: str
    adapter: str
    environment: str  # whose interpreter
    variant: str = ""


TOOLS = (
    Tool("deadweight, slim", "ours.py", HERE, "slim"),
    Tool("deadweight, stock", "ours.py", HERE, "stock"),
    Tool("TransformerLens, all processing", "lens.py", "transformer-lens", "all"),
    Tool("TransformerLens, all but centring the unembedding", "lens.py", "transformer-lens", "uncentred"),
    Tool("transformer-tricks, FlashNorm", "tricks.py", "transformer-tricks", "compatible"),
    Tool("transformer-tricks, FlashNorm strict", "tricks.py", "transformer-tricks", "strict"),
    Tool("llmcompressor, norms fused", "compressor.py", "llmcompressor", "fuse"),
    Tool("llmcompressor, SpinQuant R1 and R2", "compressor.py", "llmcompressor", "spinquant"),
    Tool("llmcompressor, SpinQuant R1 and R2, not centred", "compressor.py", "llmcompressor", "spinquant, not centred"),
    Tool("torch, BatchNorm fusion", "batchnorm.py", HERE),
)


def floating_numbers(folder: Path) -> int:
    """The number of floating-point elements in the safetensors files of a folder."""
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                piece = tensors.get_tensor(name)
                count += piece.numel() * piece.is_floating_point()
    return count


def process(command: list[str], log: Path) -> tuple[int, float]:
    """Exit status and wall time of one process."""
    start = time.perf_counter()
    with log.open("wb") as said:
        code = subprocess.run(command, stdout=said, stderr=said, env=environment()).returncode
    return code, time.perf_counter() - start


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measured(tool: Tool, model: Model, python: str | None, place: Path) -> Row:
    """One tool on one model, in both precisions."""
    if python is None:
        return Row(tool.name, model.name, "not run", f"no interpreter given for {tool.environment}")
    row = Row(tool.name, model.name, "done", floor=model.floor, probability_floor=model.probability_floor)
    for precision in PRECISIONS:
        row = with_precision(row, tool, model, python, place / precision, precision)
        if row.status != "done" and precision == PRECISIONS[0]:
            return row
    return replace(row, status="done")


def with_precision(row: Row, tool: Tool, model: Model, python: str, out: Path, precision: str) -> Row:
    out.mkdir(parents=True)
    job = {"model": str(model.folder / precision), "out": str(out), "kind": model.kind, "dtype": precision}
    job |= {"inputs": str(model.folder / "inputs.safetensors"), "variant": tool.variant}
    (out / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [python, str(ADAPTERS / tool.adapter), str(out / "job.json")]
    code, seconds = process(command, out / "log.txt")
    if code or not (out / "report.json").is_file():
        tail = (out / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return replace(row, status="failed", why=f"exit status {code}: {' '.join(tail)[:200]}")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    if report["status"] != "done":
        notes = row.notes if precision == PRECISIONS[0] else (*row.notes, f"{precision}: {report['why']}")
        return replace(row, status=report["status"], why=report["why"], notes=notes)
    row = with_errors(row, load_file(out / "outputs.safetensors"), model, precision)
    if precision != PRECISIONS[0]:
        return row
    notes = tuple(report["notes"])
    row = replace(row, seconds=report["seconds"], process_seconds=seconds, peak_bytes=report["peak_bytes"], notes=notes)
    return with_files(row, model, out / "result", model.folder / precision)


def with_errors(row: Row, outputs: dict[str, Tensor], model: Model, precision: str) -> Row:
    errors = {"logits": {**row.logits, precision: error(outputs["output"], model.truth)}}
    if model.kind == "causal":
        errors["probabilities"] = {**row.probabilities, precision: log_error(outputs["output"], model.truth)}
    if "control" in outputs:
        errors["control"] = {**row.control, precision: error(outputs["control"], model.truth)}
    return replace(row, **errors)


def with_files(row: Row, model: Model, result: Path, original: Path) -> Row:
    row = replace(row, before=floating_numbers(original), after=floating_numbers(result))
    if not (result / "config.json").is_file():
        return row
    with ONE_AT_A_TIME:
        loadings = tuple(loaded(model, result))
    return replace(row, folder=True, loadings=loadings, verified=verdict(original, result))


def loaded(model: Model, folder: Path) -> Iterator[Loading]:
    """Whether transformers loads the folder, without and with its remote code, and the outputs it then gives."""
    inputs = load_file(model.folder / "inputs.safetensors")["inputs"]
    brings_code = "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for trust in (False, True) if brings_code else (False,):
        options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": trust}
        try:
            reloaded, info = hugging_class(model.kind).from_pretrained(folder, **options)
        except Exception as problem:  # noqa: BLE001 - that it does not load is a result
            yield Loading(trust, problem=first_line(problem)[:80])
            continue
        off = error(output_of(reloaded.eval(), model.kind, inputs), model.truth)
        yield Loading(trust, len(info["missing_keys"]), len(info["unexpected_keys"]), off)


def verdict(original: Path, result: Path) -> str:
    """An independent check: both graphs, run in float64 by deadweight."""
    command = [sys.executable, "-m", "deadweight", "verify", str(original), str(result), "--json", "-"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment())
    try:
        report = json.loads(said.stdout)
    except json.JSONDecodeError:
        return "cannot open it"
    worst = max(o["float64"] if o["float64"] is not None else float("inf") for o in report["outputs"])
    return f"{'same' if report['same'] else 'different'}, {worst:.1e}"


def run(pythons: dict[str, str], only: str, tools: str, jobs: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for number, (name, (kind, build)) in enumerate(builders().items()):
            if only in name:
                place = Path(folder) / str(number)
                model = written(name, kind, *build(), place)
                for index, tool in enumerate(t for t in TOOLS if tools in t.name):
                    python = pythons.get(tool.environment)
                    waiting.append((measured, tool, model, python, place / f"tool{index}"))
        yield from pool.map(lambda job: job[0](*job[1:]), waiting)


def versions_in(python: str, names: Iterable[str]) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version\n"
        "print(json.dumps({n: version(n).split('+')[0] for n in sys.argv[1:]}))"
    )
    said = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def interpreters(words: list[str]) -> dict[str, str]:
    known = sorted({t.environment for t in TOOLS} - {HERE})
    for word in words:
        name, _, python = word.partition("=")
        if name not in known or not Path(python).is_file():
            raise typer.BadParameter(f"found {word!r}; expected NAME=PYTHON with a name of {', '.join(known)}")
    return dict(word.split("=", 1) for word in words)


def main(
    tool: Annotated[
        list[str] | None, typer.Option(help="NAME=PYTHON: the Python interpreter of a tool's environment.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only models whose name contains this.")] = "",
    tools: Annotated[str, typer.Option(help="Only tools whose name contains this.")] = "",
    jobs: Annotated[int, typer.Option(help="Number of tools that run at the same time.")] = 1,
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    if recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        rows = [from_json(r) for r in recorded_rows]
    else:
        given = interpreters(tool or [])
        pythons = {HERE: sys.executable} | given
        setting = {
            "cores": os.cpu_count(),
            "jobs": jobs,
            "versions": {HERE: {n: version(n).split("+")[0] for n in BASE}},
        }
        setting["versions"] |= {t: versions_in(python, (t, *BASE[1:])) for t, python in given.items()}
        rows = []
        for row in run(pythons, only, tools, jobs):
            rows.append(row)
            typer.echo(f"{row.model} | {row.tool} | {row.status} {row.why} {row.logits}", err=True)
    told = [asdict(r) | ({"keeps": r.keeps, "plain": r.plain} if r.status == "done" else {}) for r in rows]
    record.write_rows(json_file, setting, told)
    record.show_page(markdown(rows, setting), page)


if __name__ == "__main__":
    typer.run(main)
