"""Where the time of a training step goes, on one GPU, in about a minute.

    python benchmarks/step_profile.py --json step_profile.json

For the shapes of 38 M and 124 M parameters it times the step that `deadweight train` makes (compiled, launched kernel
by kernel), the same step as one CUDA graph, and for the small shape one to three runs side by side. A profile then says
how much of the GPU's time each kind of kernel takes, and how much of the step no kernel runs at all. On a CPU only the
plain step is timed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from deadweight.errors import DeadweightError
from deadweight.report.record import circumstances, write_rows
from deadweight.train.device_run import DeviceRun
from deadweight.train.fast_gelu import with_fast_gelu
from deadweight.train.fused_projections import with_fused_projections
from deadweight.train.objective import Objective, precision_of
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM


@dataclass(frozen=True)
class Case:
    """A shape, the sequences of a step, and how many runs at a time are tried."""

    model: dict[str, int]
    batch: int
    side_by_side: tuple[int, ...] = (1,)


SMALL = {"d_model": 512, "n_layers": 12, "heads": 8, "context": 512, "vocab_size": 256}
LARGE = {"d_model": 768, "n_layers": 12, "heads": 12, "context": 1024, "vocab_size": 50304}
TINY = {"d_model": 32, "n_layers": 2, "heads": 2, "context": 32, "vocab_size": 256}
CASES = {
    "38 M, 16,384 bytes a step": Case(SMALL, 32, (1, 2, 3)),
    "38 M, 65,536 bytes a step": Case(SMALL, 128),
    "124 M, 32,768 tokens a step": Case(LARGE, 32),
    "tiny": Case(TINY, 4, (1, 2)),
}
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "sgemm", "splitk"),
    "optimizer and clipping": ("multi_tensor", "fused_adam", "lpnorm"),
    "loss": ("losses_in_place", "softmax", "nll"),
    "norms, GELU, sums (compiled)": ("triton",),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
}


@dataclass(frozen=True)
class Row:
    """One way to make a step."""

    case: str
    way: str
    milliseconds: float  # of one step of one run
    tokens_per_second: float
    idle: float | None = None  # part of the time without any kernel
    kinds: dict[str, float] | None = None  # milliseconds of kernels, by kind


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def begin(
    case: Case, device: torch.device, steps: int, seed: int, *, optimizer: str = "adamw", fused: bool = False
) -> DeviceRun:
    """A run on random bytes, compiled on a GPU."""
    torch.manual_seed(seed)
    model = TransformerForCausalLM(TransformerConfig(**case.model)).to(device).train()
    train = Train(batch=case.batch, steps=steps, warmup=5, seed=seed, optimizer=optimizer)
    precision = precision_of(train, device)
    if device.type == "cuda":
        with_fast_gelu(model)
    if fused:
        with_fused_projections(model)
    objective = Objective(model, precision)
    loss: Callable[[torch.Tensor], torch.Tensor] = objective
    if device.type == "cuda":
        loss = torch.compile(objective, dynamic=False)
    text = torch.randint(256, (1 << 20,), dtype=torch.uint8, device=device)
    return DeviceRun(model, loss, train, text)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_steps(runs: list[DeviceRun], count: int) -> float:
    """Seconds of one step of one run."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        for run in runs:
            run.advance()
    wait()
    return (time.perf_counter() - start) / count / len(runs)


def profiled(run: DeviceRun, count: int) -> tuple[float, dict[str, float]]:
    """The part of the time without a kernel, and milliseconds of kernels per step, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        took = time_steps([run], count)
    kinds: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        kinds[kind_of(event.key)] += event.self_device_time_total / 1e3 / count
    busy = sum(kinds.values())
    return max(0.0, 1 - busy / (1e3 * took)), {k: round(v, 3) for k, v in sorted(kinds.items(), key=lambda x: -x[1])}


def measured(name: str, case: Case, device: torch.device, count: int) -> list[Row]:
    """Every way to make the step of one case."""
    tokens, rows = case.batch * case.model["context"], []
    steps = 3 * count + 40

    def row(way: str, seconds: float, idle: float | None = None, kinds: dict[str, float] | None = None) -> None:
        rows.append(Row(name, way, round(1e3 * seconds, 3), round(tokens / seconds), idle, kinds))
        print(f"{name}: {way}: {1e3 * seconds:.2f} ms, {tokens / seconds:,.0f} tokens/s", flush=True)

    first = begin(case, device, steps, 0)
    time_steps([first], 3)
    row("kernel by kernel", time_steps([first], count))
    if device.type != "cuda":
        return rows
    first.capture()
    time_steps([first], 3)
    idle, kinds = profiled(first, 5)
    row("one CUDA graph", time_steps([first], count), round(idle, 4), kinds)
    runs = [first]
    for number in case.side_by_side[1:]:
        while len(runs) < number:
            runs.append(begin(case, device, steps, len(runs)))
            runs[-1].capture()
        row(f"{number} runs side by side", time_steps(runs, max(3, count // number)))
    del runs, first
    for way, made in trials().items():
        try:
            with made[0]:
                run = begin(case, device, steps, 0, **made[1])
                run.capture()
                time_steps([run], 3)
                row(f"one CUDA graph, {way}", time_steps([run], count))
            del run
        except RuntimeError as error:
            print(f"{name}: {way}: not possible here ({str(error).splitlines()[0]})", flush=True)
    return rows


def trials() -> dict[str, tuple[AbstractContextManager[None], dict[str, Any]]]:
    """Changes that may make the step faster, each alone."""
    return {
        "Muon": (nullcontext(), {"optimizer": "muon"}),
        "queries, keys and values by one product": (nullcontext(), {"fused": True}),
        "cuDNN attention": (sdpa_kernel([SDPBackend.CUDNN_ATTENTION]), {}),
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Cases; default: all but the tiny one.")] = None,
    count: Annotated[int, typer.Option(help="Steps that are timed.")] = 40,
) -> None:
    """Time and profile the step."""
    names = only or [name for name in CASES if name != "tiny"]
    if unknown := [name for name in names if name not in CASES]:
        raise DeadweightError(f"found --only {unknown[0]}; expected one of {', '.join(CASES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for name in names:
        rows += measured(name, CASES[name], device, count)
        write_rows(json, {"count": count, **circumstances()}, rows)
    for row in rows:
        for kind, time_of in (row.kinds or {}).items():
            print(f"{row.case}: {kind:32} {time_of:7.3f} ms", flush=True)
        if row.idle is not None:
            print(f"{row.case}: without a kernel {row.idle:.1%} of the step", flush=True)


if __name__ == "__main__":
    typer.run(main)
