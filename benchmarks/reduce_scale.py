"""Time and memory to reduce a large sharded checkpoint, compared with copying the same files.

python benchmarks/reduce_scale.py --json benchmarks/results/reduce_scale.json --markdown docs/reduce-scale.md
python benchmarks/reduce_scale.py --read benchmarks/results/reduce_scale.json --markdown docs/reduce-scale.md

The checkpoints are LLaMA-type, bfloat16, random, of several depths. Each is copied (`cp -r`, then fsync of every
file) and reduced by `deadweight reduce`, in fresh processes that take turns; medians are reported. Memory is the
largest resident set of the process, less that of a process that only imports what the command imports. Processor time
says what a busy machine does not: divided by the number of cores it is the least time that reducing can take.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from process import run_process

from deadweight.report import record

WIDTH, HIDDEN, HEADS, KEYS, VOCABULARY = 4096, 14336, 32, 8, 32000  # the blocks of an 8-billion-parameter LLaMA
IMPORTS = "import deadweight.reduce.run, transformers; transformers.LlamaForCausalLM; import torch.export._trace"
MAKE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder, layers = Path(sys.argv[1]), int(sys.argv[2])
d, h, kv, v = {width}, {hidden}, {width} // {heads} * {keys}, {vocabulary}
def w(*shape):
    return torch.randn(shape, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
index = {{}}
def save(name, tensors):
    save_file(tensors, folder / name, {{"format": "pt"}})
    index.update(dict.fromkeys(tensors, name))
save("model-embed.safetensors", {{"model.embed_tokens.weight": w(v, d), "lm_head.weight": w(v, d),
     "model.norm.weight": 1 + 10 * w(d)}})
for i in range(layers):
    p = f"model.layers.{{i}}."
    save(f"model-{{i:03}}.safetensors", {{
        p + "input_layernorm.weight": 1 + 10 * w(d), p + "post_attention_layernorm.weight": 1 + 10 * w(d),
        p + "self_attn.q_proj.weight": w(d, d), p + "self_attn.k_proj.weight": w(kv, d),
        p + "self_attn.v_proj.weight": w(kv, d), p + "self_attn.o_proj.weight": w(d, d),
        p + "mlp.gate_proj.weight": w(h, d), p + "mlp.up_proj.weight": w(h, d), p + "mlp.down_proj.weight": w(d, h)}})
(folder / "model.safetensors.index.json").write_text(json.dumps({{"metadata": {{}}, "weight_map": index}}))
"""


@dataclass(frozen=True)
class Row:
    """One checkpoint."""

    layers: int
    gigabytes: float
    block_megabytes: float
    copy_seconds: float
    reduce_seconds: float
    fixed_seconds: float  # opening, tracing and proving, which do not grow with the checkpoint
    peak_megabytes: float  # above the imports
    saved: int
    runs: dict[str, list[float]]
    processor_seconds: float | None = None  # of reducing, all threads together; the present record does not say

    @property
    def processor(self) -> str:
        return "–" if self.processor_seconds is None else f"{self.processor_seconds:.1f}"

    @property
    def speed(self) -> float:
        """Total time, relative to copying."""
        return self.copy_seconds / self.reduce_seconds

    @property
    def stream_speed(self) -> float:
        """Time without the part that does not grow with the checkpoint, relative to copying."""
        return self.copy_seconds / max(self.reduce_seconds - self.fixed_seconds, 1e-9)


def make(folder: Path, layers: int) -> None:
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = MAKE.format(width=WIDTH, hidden=HIDDEN, heads=HEADS, keys=KEYS, vocabulary=VOCABULARY)
    subprocess.run([sys.executable, "-c", code, str(folder), str(layers)], check=True)


def copied(source: Path, target: Path) -> float:
    """Seconds to copy the files and flush them to disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def measure(folder: Path, layers: int, times: int, imports: int) -> Row:
    source, target = folder / f"source-{layers}", folder / "target"
    make(source, layers)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    block = (source / "model-000.safetensors").stat().st_size
    runs: dict[str, list[float]] = {"copy": [], "reduce": [], "processor": [], "plan": []}
    peaks, saved = [], 0
    for _ in range(times):
        runs["copy"].append(copied(source, target))
        shutil.rmtree(target)
        cost = run_process([sys.executable, "-m", "deadweight", "reduce", str(source), str(target)])
        runs["reduce"].append(cost.seconds)
        runs["processor"].append(cost.cpu_seconds)
        peaks.append(cost.peak_bytes - imports)
        report = json.loads((target / "deadweight.json").read_text(encoding="utf-8"))
        saved = report["parameters"]["before"] - report["parameters"]["after"]
        shutil.rmtree(target)
        planning = run_process([sys.executable, "-m", "deadweight", "reduce", str(source), "--dry-run"])
        runs["plan"].append(planning.seconds)
    shutil.rmtree(source)
    middle = {name: statistics.median(values) for name, values in runs.items()}
    return Row(
        layers,
        size / 1e9,
        block / 1e6,
        middle["copy"],
        middle["reduce"],
        middle["plan"],
        statistics.median(peaks) / 1e6,
        saved,
        {name: [round(v, 2) for v in values] for name, values in runs.items()},
        middle["processor"],
    )


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    lines = [
        "# Reducing large checkpoints",
        "",
        "This page measures how fast a large sharded checkpoint is reduced, beside copying the same files, and how "
        "much memory it takes.",
        "",
        f"**The largest, {rows[-1].gigabytes:.2f} GB, is reduced at {rows[-1].speed:.2f} times the speed of copying, "
        f"with the memory of {rows[-1].peak_megabytes / rows[-1].block_megabytes:.1f} blocks.**",
        "",
        f"LLaMA-type, bfloat16, width {WIDTH}, hidden {HIDDEN}, {KEYS} key-value heads, sharded by layer; "
        f"{setting['cores']} CPU cores, torch {setting['torch']}, median of {setting['times']}. Written by "
        "`benchmarks/reduce_scale.py`. *Speed* is the time of copying divided by that of reducing. *Proving* "
        "includes opening and tracing, which do not grow with the checkpoint. *Blocks* is the peak above the imports "
        "divided by the size of a block.",
        "",
        "| layers | GB | copy, s | reduce, s | of it proving, s | processor, s | speed | speed without proving | "
        "peak above imports, MB | blocks | parameters removed |",
        "| --- " * 11 + "|",
    ]
    lines += [
        f"| {r.layers} | {r.gigabytes:.2f} | {r.copy_seconds:.1f} | {r.reduce_seconds:.1f} | {r.fixed_seconds:.1f} | "
        f"{r.processor} | {r.speed:.2f} | {r.stream_speed:.2f} | {r.peak_megabytes:.0f} | "
        f"{r.peak_megabytes / r.block_megabytes:.1f} | {r.saved:,} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(
    layers: Annotated[str, typer.Option(help="Numbers of layers to measure, separated by commas.")] = "4,9,18",
    times: Annotated[int, typer.Option(help="Processes per number; the median counts.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Folder for the temporary checkpoints.")] = None,
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    if recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        rows = [Row(**r) for r in recorded_rows]
    else:
        import torch

        setting = {"torch": torch.__version__.split("+")[0], "cores": os.cpu_count(), "times": times}
        imports = run_process([sys.executable, "-c", IMPORTS]).peak_bytes
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows = [measure(Path(place), int(n), times, imports) for n in layers.split(",")]
        record.write_rows(json_file, setting, rows)
    record.show_page(markdown(rows, setting), page)


if __name__ == "__main__":
    typer.run(main)
