"""How fast `deadweight train` is beside nanoGPT: same shape, same batch, same text, in turns, one machine.

python benchmarks/train_speed.py --nanogpt CHECKOUT --text enwik8.xz \\
    --json benchmarks/results/train_speed.json --markdown docs/train-speed.md

nanoGPT's own train.py is run as it is (its model, its loop, bfloat16, compiled), and `deadweight train` likewise, each
in a process of its own. Both read the same bytes; the vocabulary of the 124 M shape is GPT-2's, of which bytes use
the first 256. Speed is the median over the last steps, memory what the driver says the process holds.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from deadweight.report import record

PEAK = 989e12  # dense bfloat16 FLOP/s of an H200, from its datasheet


@dataclass(frozen=True)
class Shape:
    """A GPT without biases, and the batch of one step."""

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    batch: int

    def flops_per_token(self, parameters: int) -> float:
        """FLOPs per token, forward and backward: 6 per weight, plus the scores and values of attention."""
        return 6 * parameters + 12 * self.layers * self.width * self.context


SHAPES = {
    "124 M, GPT-2's vocabulary": Shape(768, 12, 12, 1024, 50304, 32),
    "38 M, bytes": Shape(512, 12, 8, 512, 256, 128),
    "tiny": Shape(32, 2, 2, 32, 256, 4),
}
NANOGPT, OURS = "nanoGPT", "deadweight"
RIVALS = (NANOGPT, OURS, "deadweight, identity Q")


@dataclass(frozen=True)
class Row:
    """One rival on one shape."""

    shape: str
    rival: str
    parameters: int
    milliseconds: float
    tokens_per_second: float
    utilisation: float  # model FLOP/s over the peak
    gigabytes: float | None
    loss: float | None  # of the last step: the same text, so about the same number


class Memory(threading.Thread):
    """Peak memory of the GPU, from nvidia-smi."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0.0, threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which(command[0]) and not self.over.wait(1.0):
            memory = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
            self.most = max(self.most, float(memory[0]) * 2**20 / 1e9 if memory else 0.0)


def process(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[str, float]:
    """The output of a process, and its peak GPU memory."""
    memory = Memory()
    memory.start()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    memory.over.set()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout, memory.most


def nanogpt(checkout: Path, shape: Shape, tokens: np.ndarray[Any, Any], steps: int, device: str, place: Path) -> Any:
    """nanoGPT's own script, with its defaults except for the shape; it times every step."""
    work = place / "nanogpt"
    shutil.copytree(checkout, work, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    data = work / "data" / "text"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        tokens.astype(np.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").unlink(missing_ok=True)  # of another shape
    if shape.vocabulary != 50304:
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": shape.vocabulary}))
    flags = {
        "dataset": "text",
        "batch_size": shape.batch,
        "block_size": shape.context,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "gradient_accumulation_steps": 1,
        "max_iters": steps,
        "eval_interval": 10**6,
        "eval_iters": 1,
        "warmup_iters": 10,
        "device": device,
        "compile": device == "cuda",
        "always_save_checkpoint": False,
    }
    command = [sys.executable, "train.py", *(f"--{k}={v}" for k, v in flags.items())]
    said, memory = process(command, work, {**os.environ})
    lines = re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", said)
    millions = re.search(r"num decayed parameter tensors: \d+, with ([\d,]+)", said)
    assert millions is not None
    times = [float(t) for _, t in lines][len(lines) // 2 :]
    return int(millions[1].replace(",", "")), statistics.median(times), memory, float(lines[-1][0])


def ours(shape: Shape, query: str, text: Path, steps: int, place: Path) -> Any:
    """`deadweight train`, run as a command."""
    out = place / f"ours-{query}"
    log = max(1, steps // 10)
    settings = {
        "model": {
            "d_model": shape.width,
            "n_layers": shape.layers,
            "heads": shape.heads,
            "context": shape.context,
            "vocab_size": shape.vocabulary,
            "query": query,
        },
        "train": {
            "steps": steps,
            "batch": shape.batch,
            "learning_rate": 6e-4,
            "warmup": 10,
            "log_every": log,
            "save_every": 10**6,
            "evaluate_every": 10**6,
        },
        "data": {"valid_share": 0.02},
    }
    sets = [f"{t}.{k}={json.dumps(v)}" for t, table in settings.items() for k, v in table.items()]
    command = [sys.executable, "-m", "deadweight", "train", str(out), "--text", str(text), "--overwrite"]
    _, memory = process([*command, *(x for s in sets for x in ("--set", s))], place, {**os.environ})
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speeds = [x["tokens_per_second"] for x in lines if "tokens_per_second" in x][5:]
    losses = [x["loss"] for x in lines if "loss" in x]
    from deadweight.transformer import TransformerConfig, TransformerForCausalLM

    size = sum(p.numel() for p in TransformerForCausalLM(TransformerConfig.from_pretrained(out)).parameters())
    return size, shape.batch * shape.context / statistics.median(speeds) * 1e3, memory, losses[-1]


def measure(
    names: list[str], rivals: list[str], checkout: Path, text: str, steps: int, device: str, keep: Callable[[Row], None]
) -> None:
    from deadweight.source.plain_text import read_text

    read = read_text(text, print)[: 2 << 20]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "text.txt").write_bytes(read)
        tokens = np.frombuffer(read, dtype=np.uint8)
        for name in names:
            shape = SHAPES[name]
            for rival in rivals:
                start = time.perf_counter()
                if rival == "nanoGPT":
                    measured = nanogpt(checkout, shape, tokens, steps, device, place)
                else:
                    measured = ours(
                        shape, "identity" if "identity" in rival else "full", place / "text.txt", steps, place
                    )
                parameters, milliseconds, memory, loss = measured
                speed = shape.batch * shape.context / milliseconds * 1e3
                used = speed * shape.flops_per_token(parameters) / PEAK
                keep(Row(name, rival, parameters, milliseconds, speed, used, memory, loss))
                print(f"{name}, {rival}: {speed:,.0f} tokens/s ({time.perf_counter() - start:.0f} s)", flush=True)


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    lines = [
        "# Training speed",
        "",
        "This page compares the speed of `deadweight train` with nanoGPT's own script, on the same GPU and at equal "
        "shapes.",
        "",
        *ratios(rows),
        "",
        f"Written by `benchmarks/train_speed.py` on {setting['machine']}, torch {setting['torch']}, "
        f"{setting['steps']} steps each unless said below, bfloat16, compiled, taking turns. nanoGPT runs "
        "its own loop with its defaults: it waits for the GPU after every step to print the loss, while ours waits "
        "every tenth of a run. The rest of the difference is in kernels (loss, GELU, a residual stream in bfloat16). "
        "The loss is that of the last step for nanoGPT, and the mean over the last tenth for ours.",
        "",
        "| shape | | parameters | ms per step | tokens/s | against nanoGPT | of peak FLOP/s | memory, GB | loss |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        base = next((r for r in rows if r.shape == row.shape and r.rival == "nanoGPT"), row)
        lines.append(
            f"| {row.shape} | {row.rival} | {row.parameters / 1e6:.1f} M | {row.milliseconds:.1f} | "
            f"{row.tokens_per_second:,.0f} | {row.tokens_per_second / base.tokens_per_second:.3f} | "
            f"{row.utilisation:.1%} | {number(row.gigabytes, 1)} | {number(row.loss, 3)} |"
        )
    return "\n".join([*lines, *(f"\n{note}" for note in setting.get("notes", []))]) + "\n"


def ratios(rows: list[Row]) -> list[str]:
    """The verdict: ours over nanoGPT, for every shape that both were run at."""
    speeds = {(row.shape, row.rival): row.tokens_per_second for row in rows}
    both = [s for s in dict.fromkeys(r.shape for r in rows) if (s, OURS) in speeds and (s, NANOGPT) in speeds]
    return [f"- **{shape}: {speeds[shape, OURS] / speeds[shape, NANOGPT]:.2f} times nanoGPT.**" for shape in both]


def number(value: float | None, digits: int) -> str:
    return "not kept" if value is None else f"{value:.{digits}f}"


def main(
    nanogpt_checkout: Annotated[Path | None, typer.Option("--nanogpt", help="A checkout of karpathy/nanoGPT.")] = None,
    text: Annotated[str, typer.Option(help="Training text.")] = "embedded",
    steps: Annotated[int, typer.Option(help="Steps of every run.")] = 80,
    shapes: Annotated[str, typer.Option(help="Names of SHAPES, separated by semicolons.")] = ";".join(list(SHAPES)[:2]),
    rivals: Annotated[str, typer.Option(help="Trainers to run, separated by semicolons.")] = ";".join(RIVALS),
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    if recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        rows = [Row(**r) for r in recorded_rows]
    else:
        import torch

        if nanogpt_checkout is None:
            raise SystemExit("--nanogpt is missing; expected a checkout of karpathy/nanoGPT")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        machine = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
        setting = {"machine": machine, "torch": torch.__version__, "steps": steps}
        rows = []

        def keep(row: Row) -> None:
            rows.append(row)
            record.write_rows(json_file, setting, rows)

        measure(shapes.split(";"), rivals.split(";"), nanogpt_checkout.absolute(), text, steps, device, keep)
    record.show_page(markdown(rows, setting), page)


if __name__ == "__main__":
    typer.run(main)
