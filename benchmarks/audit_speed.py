"""Time and memory of the audit of a config, compared with the imports that it cannot avoid.

python benchmarks/audit_speed.py --json benchmarks/results/audit_speed.json --markdown docs/audit-speed.md
python benchmarks/audit_speed.py --read benchmarks/results/audit_speed.json --markdown docs/audit-speed.md

Every number comes from a fresh process; the median of several is taken. Ratios are between processes of one run, on
one machine: "beyond the imports" subtracts a process that only imports torch and transformers, and, since
transformers loads its model code on first use, also one that imports the model's class.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from process import run_process

from deadweight.report import record

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-2, 12 layers": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "Qwen2 72B, 4 layers": QWEN | {"num_hidden_layers": 4},
    "Qwen2 72B, 80 layers": QWEN | {"num_hidden_layers": 80},
    "LLaMA 405B, 4 layers": LLAMA | {"num_hidden_layers": 4},
    "LLaMA 405B, 126 layers": LLAMA | {"num_hidden_layers": 126},
}
IMPORTS = {
    "import torch, transformers": "import torch, transformers",
    "… and GPT-2's class": "import torch, transformers; transformers.GPT2LMHeadModel",
}
BASE, CLASS = IMPORTS
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One process, several times."""

    name: str
    seconds: float  # median
    processor_seconds: float  # median, of all threads together: what a busy machine changes least
    peak_bytes: int  # median of the largest resident set
    runs: tuple[float, ...]


@dataclass(frozen=True)
class Target:
    """A limit on a number, and the number."""

    words: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def measure(name: str, command: list[str], times: int) -> Row:
    runs = [run_process(command) for _ in range(times)]
    seconds = [r.seconds for r in runs]
    return Row(
        name,
        statistics.median(seconds),
        statistics.median(r.cpu_seconds for r in runs),
        int(statistics.median(r.peak_bytes for r in runs)),
        tuple(round(s, 2) for s in seconds),
    )


def run(times: int, only: str) -> list[Row]:
    rows = [measure(name, [sys.executable, "-c", code], times) for name, code in IMPORTS.items()]
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            if only in name:
                file = Path(folder) / name.replace(" ", "-") / "config.json"
                file.parent.mkdir()
                file.write_text(json.dumps(config), encoding="utf-8")
                rows.append(measure(name, [sys.executable, "-m", "deadweight", "audit", str(file)], times))
    return rows


def targets(rows: list[Row]) -> list[Target]:
    by = {row.name: row for row in rows}
    results = []
    if "GPT-2, 12 layers" in by:
        gpt2 = by["GPT-2, 12 layers"].processor_seconds
        results.append(
            Target(
                "GPT-2: processor seconds beyond importing torch, transformers and its class",
                gpt2 - by[CLASS].processor_seconds,
                3.0,
            )
        )
    for few, many in (
        ("Qwen2 72B, 4 layers", "Qwen2 72B, 80 layers"),
        ("LLaMA 405B, 4 layers", "LLaMA 405B, 126 layers"),
    ):
        if few in by and many in by:
            results.append(
                Target(
                    f"{many}: time divided by that of 4 layers",
                    by[many].processor_seconds / by[few].processor_seconds,
                    2.0,
                )
            )
            above = (by[many].peak_bytes - by[BASE].peak_bytes) / GIB
            results.append(Target(f"{many}: peak memory above the imports, GiB", above, 1.0))
    return results


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    base = next(r for r in rows if r.name == BASE)
    lines = [
        "# How long an audit takes",
        "",
        "This page measures time and memory of an audit of a bare config, up to 405 billion parameters.",
        "",
        "| ratio or difference | found | target |",
        "| --- | --- | --- |",
        *(f"| {t.words} | {t.value:.2f} | ≤ {t.limit:g}{'' if t.met else ', missed'} |" for t in targets(rows)),
        "",
        f"`deadweight audit config.json` needs no weights. Each time is the median of {setting['times']} fresh "
        f"processes on {setting['cores']} CPU cores; torch {setting['torch']}, transformers "
        f"{setting['transformers']}. Written by `benchmarks/audit_speed.py`.",
        "",
        "*Processor* is the processor time of all threads, which other programs on the machine change least. The "
        "ratios and differences above are of processor time. The seconds are wall time.",
        "",
        "| process | seconds | beyond the imports | processor, s | beyond the imports | peak memory, GiB | "
        "above the imports |",
        "| --- " * 7 + "|",
    ]
    for r in rows:
        beyond, above = r.seconds - base.seconds, (r.peak_bytes - base.peak_bytes) / GIB
        work = r.processor_seconds - base.processor_seconds
        lines.append(
            f"| {r.name} | {r.seconds:.1f} | {beyond:.1f} | {r.processor_seconds:.1f} | {work:.1f} | "
            f"{r.peak_bytes / GIB:.2f} | {above:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(
    times: Annotated[int, typer.Option(help="Processes per number; the median counts.")] = 3,
    only: Annotated[str, typer.Option(help="Only configs whose name contains this.")] = "",
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    if recorded is not None:
        setting, recorded_rows = record.read_rows(recorded)
        rows = [Row(**{**r, "runs": tuple(r["runs"])}) for r in recorded_rows]
    else:
        from importlib.metadata import version

        setting = {"times": times, "cores": os.cpu_count()}
        setting |= {name: version(name).split("+")[0] for name in ("torch", "transformers")}
        rows = run(times, only)
    record.write_rows(json_file, setting, rows, targets=[asdict(t) for t in targets(rows)])
    record.show_page(markdown(rows, setting), page)


if __name__ == "__main__":
    typer.run(main)
