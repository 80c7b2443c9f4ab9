"""The page of the decoding benchmark."""

from __future__ import annotations

from typing import Any

CODED = "coded cache"
HEAD = """\
# Decoding from a coded cache

This page says when a model decodes faster from a coded cache. `benchmarks/decode.py` runs steps of one token for every
row of a batch, from a cache that is full. Original and coded cache are compiled by torch.compile and captured as CUDA
graphs, and timed in turns on one GPU. Weights and maps are random: they decide which text comes out, not how fast.
Bytes of the coded cache include its scales. The original was run with torch's attention kernels that need no mask;
*times the best* compares tokens per second with the best of them. The configs are those of LLaMA 3 with 1 and 8
billion parameters. Combinations that are not in the tables were not run.

**The coded cache of a whole step has maps for half heads** (`compress --keys half`), the fastest kind. Quality is
another question: on SmolLM2 half heads lose more than what `compress` does by default ([cache](cache.md))."""
AGAIN = """\
Repeat it on a GPU with `python benchmarks/decode.py run --config LLaMA-1B --shapes 64x16384,1x131072 --fit 16`, the
same with `--config LLaMA-8B --shapes 32x16384`, and `python benchmarks/decode.py report --markdown docs/decode.md`."""


def decode_page(
    setting: dict[str, Any],
    rows: list[dict[str, Any]],
    on_cpu: tuple[dict[str, Any], list[dict[str, Any]]] = ({}, []),
) -> str:
    lines = [HEAD, "", *summary(rows), "", *decode_table(setting, rows)]
    if prefill := [r for r in rows if r["kind"] == "prefill"]:
        lines += ["", "## Prefill", "", "| model | batch × tokens | | ms |", "| --- " * 4 + "|"]
        lines += [f"| {r['model']} | {by(r)} | {r['method']} | {r['milliseconds']:.1f} |" for r in prefill]
    if longest := [r for r in rows if r["kind"] == "longest"]:
        lines += ["", "## The longest context that fits", "", "| model | batch | | tokens |", "| --- " * 4 + "|"]
        lines += [f"| {r['model']} | {by(r).split()[0]} | {r['method']} | {r['longest']:,} |" for r in longest]
    if alone := [r for r in rows if r["kind"] == "attention"]:
        lines += ["", *attention_table(setting, alone)]
    if on_cpu[1]:
        lines += ["", *cpu_table(*on_cpu)]
    machine = f"torch {setting['torch']}, transformers {setting['transformers']}, {setting['machine']}"
    return "\n".join([*lines, "", AGAIN, "", f"Run with {machine}."]) + "\n"


def attention_table(setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The attention of one layer alone."""
    lines = [
        "## Attention of one layer",
        "",
        "One new token for every row of the batch. The time includes joining the parts, not encoding the new token.",
        "*Keys by head* are made of the codes by a map for each head, *by half* by one for its faster and one for its",
        "slower rotary pairs.",
        "",
        "| model | batch × tokens | | bytes | µs | of a copy's speed |",
        "| --- " * 6 + "|",
    ]
    for r in rows:
        speed = r["bytes_read_per_second"] / float(setting["copy"])
        numbers = f"{r['share']:.1%} | {1e3 * r['milliseconds']:.0f} | {speed:.0%}"
        lines.append(f"| {r['model']} | {by(r)} | {r['method']} | {numbers} |")
    return lines


def cpu_table(setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Steps on a CPU, by processor time."""
    lines = [
        "## On a CPU",
        "",
        "Processor time of a step of one row, original and coded cache in turns, float32 (`benchmarks/decode_cpu.py`;",
        f"torch {setting['torch']}, transformers {setting['transformers']}, {setting['machine']}, a machine that ran",
        "other things too).",
        "",
        "| model | tokens | bytes | threads | original, ms | coded, ms | times the original |",
        "| --- " * 7 + "|",
    ]
    return lines + [
        f"| {r['model']} | {r['tokens']:,} | {r['share']:.1%} | {r['threads']} | {r['original']:.0f} | "
        f"{r['coded']:.0f} | {r['coded'] / r['original']:.2f} |"
        for r in rows
    ]


def by(row: dict[str, Any]) -> str:
    batch, length = map(int, row["shape"].split("x"))
    return f"{batch} × {length:,}"


def decodes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if r["kind"] == "decode"]


def fastest(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Milliseconds of the fastest original at the same shape."""
    same = [r for r in decodes(rows) if (r["model"], r["shape"]) == (row["model"], row["shape"])]
    return min((r["milliseconds"] for r in same if r["method"] != CODED), default=float("nan"))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"- {r['model']}, {by(r)}: {fastest(rows, r) / r['milliseconds']:.2f} times the fastest original that was run, "
        f"with {r['share']:.1%} of its bytes."
        for r in decodes(rows)
        if r["method"] == CODED
    ]


def decode_table(setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    copy = float(setting["copy"])
    lines = [
        f"A copy reads and writes {copy / 1e12:.2f} TB/s here.",
        "",
        "| model | batch × context | | share of bytes | ms per step | tokens/s | times the best | cache read, TB/s |",
        "| --- " * 8 + "|",
    ]
    for r in decodes(rows):
        speed = int(r["shape"].split("x")[0]) / r["milliseconds"] * 1e3
        lines.append(
            f"| {r['model']} | {by(r)} | {r['method']} | {r['share']:.1%} | {r['milliseconds']:.2f} | {speed:,.0f} | "
            f"{fastest(rows, r) / r['milliseconds']:.2f} | {r['bytes_read_per_second'] / 1e12:.2f} |"
        )
    return lines
