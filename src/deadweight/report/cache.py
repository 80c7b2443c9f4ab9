"""A coded cache in the terminal and as a picture: where the bits went, and what it costs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deadweight.compress.cache_result import CacheCompression, CurvePoint, outcome_line, perplexity_rise
from deadweight.report.figure import Axes, Figure, pyplot, save
from deadweight.slim.format import WIDTHS, CodeSpec

BLOCKS = " ▁▂▃▄▅▆▇█"  # a coordinate with 0, 1, … 8 bits
COLUMNS = 24  # characters that show the coordinates of a layer, the costliest first


def widths_of(stage: CodeSpec) -> list[int]:
    """The bits of every coordinate, the widest first; zeros are the coordinates that are not stored."""
    stored = sorted((w for run in stage.runs for w, n in zip(WIDTHS, run, strict=True) for _ in range(n)), reverse=True)
    return stored + [0] * max(0, stage.inputs * len(stage.runs) - len(stored))


def bar(stage: CodeSpec) -> str:
    """The bits of the coordinates as a falling line of blocks."""
    widths = widths_of(stage)
    pieces = [widths[i * len(widths) // COLUMNS : max(1, (i + 1) * len(widths) // COLUMNS)] for i in range(COLUMNS)]
    return "".join(BLOCKS[round(sum(p) / max(len(p), 1))] for p in pieces)


def mean_bits(stage: CodeSpec) -> float:
    return 8 * stage.row_bytes / (stage.inputs * len(stage.runs))


def print_cache(result: CacheCompression, console: Console) -> None:
    if len(result.points) > 1:
        print_curve(result, console)
    else:
        print_layers(result, console)
        before, after = result.bytes_per_token
        console.print(
            f"\ncache {before:,} → {after:,} bytes per token; {result.point.share:.1%} of a 16-bit cache at "
            f"{result.tokens:,} tokens, {result.bits:.2f} bits per number, everything included",
            highlight=False,
        )
        if result.before_healing is not None:
            print_point("before healing, ", result.before_healing, console)
        print_point("", result.point, console)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def print_point(prefix: str, point: CurvePoint, console: Console) -> None:
    for name, judgement in point.judgements.items():
        console.print(f"{prefix}{outcome_line(name, judgement)}", highlight=False, markup=False)
    if len(point.judgements) > 1:
        rises = [perplexity_rise(j) for j in point.judgements.values()]
        console.print(f"difference between the texts: {max(rises) - min(rises):.2%}", highlight=False)


def print_layers(result: CacheCompression, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    for side in ("key", "value"):
        table.add_column(f"{side} bits", justify="right")
        table.add_column("costliest coordinate … cheapest")
    for path, spec in result.caches.items():
        keys = (f"{mean_bits(spec.shared):.1f}", bar(spec.shared))
        values = ("", "with the keys") if spec.joint else (f"{mean_bits(spec.values):.1f}", bar(spec.values))
        table.add_row(Text(path), *keys, *values)
    console.print(table)


def print_curve(result: CacheCompression, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("share of 16 bits", "bits", *(f"perplexity, {text}" for text in result.point.judgements)):
        table.add_column(name, justify="right")
    for point in result.points:
        rises = [f"{perplexity_rise(j):+.2%}" for j in point.judgements.values()]
        table.add_row(f"{point.share:.1%}", f"{16 * point.share:.2f}", *rises)
    console.print(table)
    console.print(f"\nat {result.tokens:,} tokens; nothing was written", highlight=False)


def plot_cache(result: CacheCompression, file: Path) -> None:
    """The curve, or the bits of every layer's keys and values."""
    if len(result.points) > 1:
        picture, axes = pyplot().subplots(figsize=(6, 4), layout="constrained")
        draw_curve(axes, result)
    else:
        picture, axes = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
        draw_bits(picture, axes, result)
    save(picture, file)


def draw_curve(axes: Axes, result: CacheCompression) -> None:
    shares = [100 * point.share for point in result.points]
    for name in result.point.judgements:
        rises = [100 * max(perplexity_rise(p.judgements[name]), 1e-5) for p in result.points]
        axes.plot(shares, rises, "o-", label=name)
    axes.set(yscale="log", xlabel="bytes of a 16-bit cache (%)", ylabel="rise of perplexity (%)", title=result.model)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()


def draw_bits(picture: Figure, axes: Axes, result: CacheCompression) -> None:
    specs = result.caches.values()
    joint = all(spec.joint for spec in specs)
    sides = {"keys and values" if joint else "keys": [widths_of(spec.shared) for spec in specs]}
    sides |= {} if joint else {"values": [widths_of(spec.values) for spec in specs]}
    for axis, (name, rows) in zip(axes, sides.items(), strict=False):
        longest = max(map(len, rows))
        image = axis.imshow(
            [row + [0] * (longest - len(row)) for row in rows], aspect="auto", vmin=0, vmax=8, cmap="viridis"
        )
        axis.set(title=f"bits of {name}", xlabel="coordinate, the costliest first", ylabel="layer")
    picture.colorbar(image, ax=axes, label="bits")
