"""How much memory compressing takes as models get deeper.

python benchmarks/compress_memory.py --json benchmarks/results/compress_memory.json --markdown docs/compress-memory.md
python benchmarks/compress_memory.py --read benchmarks/results/compress_memory.json --markdown docs/compress-memory.md

LLaMA-type models in bfloat16 with random weights, of several depths, each given a cache of a quarter of the bytes in a
fresh process. Memory is what the process has allocated (pages that the system can take back, such as those of the
mapped checkpoint, do not count), sampled every few milliseconds, less what it had after its imports; on a GPU, what
torch has allocated there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deadweight.report import record

WIDTH, HIDDEN, HEADS, KEYS, VOCABULARY = 2048, 8192, 32, 8, 32000  # the blocks of a 1-billion-parameter LLaMA
BLOCK = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH * KEYS // HEADS + 3 * WIDTH * HIDDEN)  # bytes in float32

SHARE = 0.25  # of the bytes of a 16-bit cache
STAGES = ("measuring", "judging", "writing")


@dataclass(frozen=True)
class Row:
    """One model."""

    layers: int
    parameters: int
    peaks: dict[str, float]  # bytes by stage
    device: float  # bytes on the GPU

    @property
    def peak(self) -> float:
        return max(self.peaks.values())


def make(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def allocated() -> int:
    """Bytes of this process that lie nowhere else."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("found no RssAnon in /proc/self/status; expected Linux")


def child(folder: Path, out: Path, windows: int, length: int) -> None:
    """Compress, and print what it took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from deadweight.compress.run import compress

    with torch.device("meta"):
        parameters = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).num_parameters()
    before, stage, peaks = allocated(), ["opening"], dict[str, float]()

    def watch() -> None:
        while True:
            peaks[stage[0]] = max(peaks.get(stage[0], 0), allocated() - before)
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    ids = torch.randint(3, VOCABULARY, (windows, length), generator=torch.Generator().manual_seed(0))
    compress(
        str(folder),
        out,
        keep_kv=SHARE,
        inputs={"input_ids": ids},
        batch=2,
        progress=lambda what, done, of: stage.__setitem__(0, what),
    )
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps([parameters, peaks, device]))


def measure(place: Path, layers: int, windows: int, length: int) -> Row:
    folder, out = place / f"model-{layers}", place / "out"
    make(folder, layers)
    command = [sys.executable, __file__, "--child", f"{folder}:{out}:{windows}:{length}"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    shutil.rmtree(folder)
    shutil.rmtree(out)
    return Row(layers, *json.loads(said.splitlines()[-1]))


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    first, last = rows[0], rows[-1]
    growth = (last.peak - first.peak) / (last.layers - first.layers)
    lines = [
        "# Memory of compressing",
        "",
        "This page measures how much memory `deadweight compress` needs as a model gets deeper.",
        "",
        f"**{last.peak / 1e9:.2f} GB for {last.parameters / 1e9:.2f} B parameters; each further block takes "
        f"{growth / 1e6:.0f} MB.** That is {growth / BLOCK:.0%} of the block's weights in float32: the measurements "
        "of its keys and values, and their bases.",
        "",
        f"LLaMA-type, bfloat16, width {WIDTH}, hidden {HIDDEN}, {KEYS} key-value heads of {WIDTH // HEADS}, random "
        f"weights; `--keep-kv {SHARE}`, {setting['windows']} windows of {setting['length']} tokens, two at a time; "
        f"{setting['machine']}, torch {setting['torch']}. Written by `benchmarks/compress_memory.py`, which says what "
        f"is measured. A block has {BLOCK / 1e6:.0f} MB in float32.",
        "",
        "| layers | parameters | in float32, GB | peak, GB | peak / float32 | measuring, GB | judging, GB | "
        "writing, GB |",
        "| --- " * 8 + "|",
    ]
    for r in rows:
        whole = 4 * r.parameters
        lines.append(
            f"| {r.layers} | {r.parameters:,} | {whole / 1e9:.2f} | {r.peak / 1e9:.2f} | {r.peak / whole:.0%} | "
            + " | ".join(f"{r.peaks.get(stage, 0) / 1e9:.2f}" for stage in STAGES)
            + " |"
        )
    if last.device:
        lines += ["", f"On the GPU the deepest model needs {last.device / 1e9:.2f} GB."]
    return "\n".join(lines) + "\n"


def main(
    layers: Annotated[str, typer.Option(help="Numbers of layers to measure, separated by commas.")] = "4,8,16",
    windows: Annotated[int, typer.Option(help="Number of calibration windows.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 256,
    folder: Annotated[Path | None, typer.Option(help="Folder for the temporary checkpoints.")] = None,
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
    one: Annotated[str | None, typer.Option("--child", hidden=True)] = None,
) -> None:
    if one is not None:
        source, out, *numbers = one.split(":")
        child(Path(source), Path(out), *map(int, numbers))
        return
    if recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        rows = [Row(**r) for r in recorded_rows]
    else:
        import torch

        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
        setting = {"torch": torch.__version__.split("+")[0], "machine": machine, "windows": windows, "length": length}
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows = [measure(Path(place), int(n), windows, length) for n in layers.split(",")]
        record.write_rows(json_file, setting, rows)
    record.show_page(markdown(rows, setting), page)


if __name__ == "__main__":
    typer.run(main)
