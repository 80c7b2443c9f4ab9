"""Measured saturation as a table, as JSON, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deadweight.report.allocation import plain
from deadweight.report.figure import Axes, Figure, pyplot, save
from deadweight.report.text import plural, printable
from deadweight.saturation.run import Saturation
from deadweight.saturation.slopes import FLAT, GROWS, SATURATES, VERDICTS, Head, LayerSlopes
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__

DIGITS = 5  # of numbers in JSON


def print_saturation(saturation: Saturation, console: Console, *, heads: bool = False) -> None:
    """A row for each layer, or for each head; then what the numbers allow."""
    heading = (
        f"{printable(saturation.model)} on {printable(saturation.text)}: {plural(saturation.windows, 'window')} of "
        f"{saturation.lengths[-1]:,} tokens, rows of {saturation.lengths[0]} to {saturation.lengths[-1]:,} keys\n"
    )
    console.print(Text(heading))
    console.print(head_table(saturation) if heads else layer_table(saturation))
    for line in conclusion(saturation):
        console.print(Text(line))
    for note in saturation.notes:
        console.print(Text(f"note: {note}"))


def layer_table(saturation: Saturation) -> Table:
    first, last = f"{saturation.lengths[0]}", f"{saturation.lengths[-1]:,}"
    norms, ranges = ((f"{name}\nat {first}", f"at\n{last}") for name in ("norm", "range"))
    slopes = ("\nslope", "without\n1st key", "\n1/L", "\npart", "\nflat", "\ngrow")
    table = plain("\nlayer", *norms, *slopes, *ranges, "\ngrowth", "\nfactor")
    for i, (layer, factor) in enumerate(zip(saturation.layers, saturation.factors, strict=True)):
        table.add_row(
            f"{i}",
            *(f"{layer.mean('norm', place):.3g}" for place in (0, -1)),
            format_signed(layer.slope),
            format_signed(layer.rest_slope),
            *(f"{layer.count(v) or ''}" for v in VERDICTS),
            *(f"{layer.mean('logit_range', place):.1f}" for place in (0, -1)),
            format_signed(layer.range_slope),
            f"{factor:.2f}",
        )
    return table


def head_table(saturation: Saturation) -> Table:
    last = f"at {saturation.lengths[-1]:,}"
    columns = ("layer", "head", "slope", "±", "verdict", "without\n1st key", f"norm\n{last}")
    table = plain(*columns, f"largest p\n{last}", f"entropy\n{last}", f"range\n{last}", "growth")
    for i, layer in enumerate(saturation.layers):
        for h in layer.heads:
            end = h.by_length[-1]
            table.add_row(
                f"{i}",
                f"{h.head}",
                format_signed(h.slope),
                "" if h.error is None else f"{h.error:.2f}",
                h.verdict + ("" if h.sure else " ?"),
                format_signed(h.rest_slope),
                f"{end.norm:.3g}",
                f"{end.largest:.2f}",
                f"{end.entropy:.2f}",
                f"{end.logit_range:.1f}",
                format_signed(h.range_slope),
            )
    return table


def format_signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}".replace("-", "−")


def conclusion(saturation: Saturation) -> list[str]:
    """How many heads saturate, by which criterion, and what that allows."""
    heads = [h for layer in saturation.layers for h in layer.heads]
    saturating, partly, flat, growing = (sum(h.verdict == v for h in heads) for v in VERDICTS)
    unsure = sum(not h.sure for h in heads)
    unbounded = sum((h.range_slope or 0) >= 1 for h in heads)
    return [
        f"\nof {plural(len(heads), 'head')}, {saturating} saturate (like 1/L), {partly} in part, {flat} stay flat, "
        f"{growing} grow",
        f"by the slope of log-norm over log-length: 1/L up to {SATURATES:g}, part to {FLAT:g}, flat to {GROWS:g}, "
        f"grow above; {plural(unsure, 'head')} within two standard errors of another verdict (? with --heads)".replace(
            "-0.", "−0."
        ),
        "the published bound, norm ≤ e^range/length, falls with length only while the logit range grows by less than 1 "
        f"per e-fold of length (column growth): it grows by 1 or more in {unbounded} of {len(heads)} heads",
        say_what_is_allowed(saturating + partly, len(heads)),
    ]


def say_what_is_allowed(falling: int, n: int) -> str:
    if falling == 0:
        return (
            "no head becomes less sensitive to its logits with length, so this gives no reason to make a head smaller"
        )
    return (
        f"{falling} of {n} heads become less sensitive to their logits with length; factor is what deadweight allocate "
        "plan --saturation takes from it, relative to the most sensitive layer"
    )


def saturation_data(saturation: Saturation) -> JsonObject:
    """Everything, for programs: a row of numbers for each length of each head, named in `columns`."""
    return {
        "deadweight": __version__,
        "model": saturation.model,
        "text": saturation.text,
        "lengths": list(saturation.lengths),
        "windows": saturation.windows,
        "rows": saturation.rows,
        "seed": saturation.seed,
        "criterion": {"saturates": SATURATES, "flat": FLAT, "grows": GROWS},
        "factors": [round_number(f) for f in saturation.factors],
        "layers": [layer_data(layer) for layer in saturation.layers],
        "notes": list(saturation.notes),
    }


def layer_data(layer: LayerSlopes) -> JsonObject:
    return {"path": layer.path, "slope": round_number(layer.slope), "heads": [head_data(h) for h in layer.heads]}


def head_data(h: Head) -> JsonObject:
    data = {name: round_number(getattr(h, name)) for name in ("slope", "error", "rest_slope", "range_slope")}
    rows = [asdict(at) for at in h.by_length]
    columns = {
        name: [
            [round_number(v) for v in row[name]] if isinstance(row[name], tuple) else round_number(row[name])
            for row in rows
        ]
        for name in rows[0]
    }
    return {"head": h.head, "verdict": h.verdict, "sure": h.sure, **data, "by_length": columns}


def round_number(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class HeadCurve:
    """One head in a picture: its slope, and the mean norm and logit range at each length."""

    head: int
    slope: float | None
    lengths: list[int]
    norm: list[float]
    logit_range: list[float]

    @classmethod
    def of(cls, data: JsonObject) -> HeadCurve:
        columns: JsonObject = data.get("by_length", {})
        lengths, norm, logit_range = (columns.get(name, []) for name in ("length", "norm", "logit_range"))
        return cls(data.get("head", 0), data.get("slope"), lengths, norm, logit_range)


@dataclass(frozen=True)
class Curves:
    """What a picture shows of the data of a measurement, which may come from a file."""

    title: str
    lengths: list[int]
    layers: list[list[HeadCurve]]

    @classmethod
    def of(cls, data: JsonObject) -> Curves:
        title = f"{data.get('model')}, {data.get('windows')} windows of {data.get('text')}"
        layers = [[HeadCurve.of(head) for head in layer.get("heads", [])] for layer in data.get("layers", [])]
        return cls(title, data.get("lengths", []), layers)


def plot_saturation(data: JsonObject, file: Path) -> None:
    """From the data of a measurement: norm against length by layer, slopes by layer and head, logit ranges."""
    picture, axes = pyplot().subplots(1, 3, figsize=(14, 4), layout="constrained")
    draw_panels(picture, axes, data)
    save(picture, file)


def draw_panels(picture: Figure, axes: Axes, data: JsonObject) -> None:
    curves = Curves.of(data)
    draw_by_length(axes[0], curves, lambda head: head.norm)
    axes[0].plot(curves.lengths, [1 / n for n in curves.lengths], "k:", linewidth=1, label="1/L")
    axes[0].set(yscale="log", ylabel="norm of the Jacobian (mean)")
    axes[0].set_title(curves.title, fontsize=9)
    axes[0].legend(fontsize=8)
    draw_slopes(picture, axes[1], curves)
    draw_by_length(axes[2], curves, lambda head: head.logit_range)
    axes[2].set(ylabel="logit range (max − min, mean)")
    scale = pyplot().cm.ScalarMappable(pyplot().Normalize(0, max(1, len(curves.layers) - 1)), "viridis")
    picture.colorbar(scale, ax=axes[2], label="layer")


def draw_by_length(axes: Axes, curves: Curves, values_of: Callable[[HeadCurve], list[float]]) -> None:
    """A line for each layer: the mean over its heads."""
    colours = pyplot().get_cmap("viridis")
    for i, heads in enumerate(curves.layers):
        means = [math.fsum(column) / len(heads) for column in zip(*map(values_of, heads), strict=True)]
        colour = colours(i / max(1, len(curves.layers) - 1))
        axes.plot(heads[0].lengths, means, color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("keys in the row")


def draw_slopes(picture: Figure, axes: Axes, curves: Curves) -> None:
    widest = max(map(len, curves.layers))
    table = [[math.nan] * len(curves.layers) for _ in range(widest)]
    for i, heads in enumerate(curves.layers):
        for h in heads:
            table[h.head][i] = math.nan if h.slope is None else h.slope
    image = axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", origin="lower")
    axes.set(xlabel="layer", ylabel="head")
    axes.set_title("slope of log-norm on log-length", fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(pyplot().MaxNLocator(integer=True))
    picture.colorbar(image, ax=axes)
