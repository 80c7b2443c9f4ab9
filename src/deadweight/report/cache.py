"""A coded cache in the terminal and as a picture: where the bits went, and what it costs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deadweight.compress.cache_result import CacheCompression, CurvePoint, outcome_line, perplexity_rise
from deadweight.report.figure import Axes, Figure, pyplot, save
from deadweight.slim.format import CacheSpec

BLOCKS = " ▁▂▃▄▅▆▇█"  # a coordinate with 0, 1, … 8 bits
COLUMNS = 24  # characters that show the coordinates of a layer, the costliest first
BITS_WORDS = (
    "A coordinate is one number of a key or value, in the basis in which it is coded. The coordinates whose errors "
    "raise the loss most get the most bits."
)
JOINT_WORDS = "With the keys: the keys and values of that layer are coded together, as one vector."
COST_WORDS = (
    "KL: Kullback-Leibler divergence, how far the predictions moved from the original's. Held-back calibration text: a "
    "part of the calibration text that was not used to choose the codes."
)


def widths_of(spec: CacheSpec, *, values: bool) -> list[int]:
    """The bits of every coordinate of keys, or of values, the widest first; zeros are not stored."""
    fields = slice(spec.key_fields, None) if values else slice(0, spec.key_fields)
    stored = sorted((w for own in spec.widths for unit in own for w in unit[fields] if w), reverse=True)
    return stored + [0] * max(0, (spec.set_values if values else spec.inputs) * spec.n_sets - len(stored))


def bar(widths: list[int]) -> str:
    """The bits of the coordinates as a falling line of blocks."""
    pieces = [widths[i * len(widths) // COLUMNS : max(1, (i + 1) * len(widths) // COLUMNS)] for i in range(COLUMNS)]
    return "".join(BLOCKS[round(sum(p) / max(len(p), 1))] for p in pieces)


def mean_bits(widths: list[int]) -> float:
    return sum(widths) / max(len(widths), 1)


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
        console.print()
        for words in cache_words(result):
            console.print(words, style="dim", highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def cache_words(result: CacheCompression) -> tuple[str, ...]:
    """What the words of the report mean."""
    joint = (JOINT_WORDS,) if any(spec.joint for spec in result.caches.values()) else ()
    return (BITS_WORDS, *joint, COST_WORDS)


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
        sides = [widths_of(spec, values=values) for values in (False, True)]
        keys, values = ((f"{mean_bits(widths):.1f}", bar(widths)) for widths in sides)
        table.add_row(Text(path), *keys, *(("", "with the keys") if spec.joint else values))
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
    sides = {"keys and values" if joint else "keys": [widths_of(spec, values=False) for spec in specs]}
    sides |= {} if joint else {"values": [widths_of(spec, values=True) for spec in specs]}
    for axis, (name, rows) in zip(axes, sides.items(), strict=False):
        longest = max(map(len, rows))
        image = axis.imshow(
            [row + [0] * (longest - len(row)) for row in rows], aspect="auto", vmin=0, vmax=8, cmap="viridis"
        )
        axis.set(title=f"bits of {name}", xlabel="coordinate, the costliest first", ylabel="layer")
    picture.colorbar(image, ax=axes, label="bits")
