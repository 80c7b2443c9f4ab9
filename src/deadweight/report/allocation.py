"""Allocations and plans as tables, as JSON, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from deadweight.allocate.bound import curve, lag_errors
from deadweight.allocate.plan import HeadPlan, PlannedLayer
from deadweight.allocate.relaxed import relax
from deadweight.allocate.solver import Optimum
from deadweight.report.figure import pyplot, save
from deadweight.report.text import plural
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__

BAR = 30  # columns of the longest bar
SHOWN = (1, 2, 3, 4, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 192, 256)  # heads per lag in the table


def print_bound(optimum: Optimum, source: str, console: Console) -> None:
    """The optimum by lag, then the curve for equal heads at all lags."""
    task, m = optimum.task, len(optimum.groups)
    console.print(f"{source}: {plural(len(task.profile), 'lag')}, tokens of {task.d_token} dimensions")
    console.print(
        f"{optimum.limit.name} {optimum.limit.value:,g}: room for a Σ heads × size of {optimum.limit.width:,}\n"
    )
    console.print(lag_table(optimum, block(console)))
    console.print(
        f"\nbound {optimum.error:.4g} with {plural(m, 'lag')} and {plural(optimum.heads, 'head')}, "
        f"width {optimum.width:,}: no whole numbers have a lower one"
    )
    loose = relax(task, optimum.limit.width)
    heads = ", ".join(f"{h:.3g}" for h in loose.heads[:4]) + (", …" if len(loose.heads) > 4 else "")
    console.print(
        f"with real numbers of heads, all of size {task.d_token}: bound {loose.error:.4g}, "
        f"{plural(len(loose.heads), 'lag')}, heads {heads}\n"
    )
    console.print(f"{plural(m, 'lag')}, all with as many heads, of size D / (lags · heads), not rounded:")
    console.print(curve_table(optimum, block(console)))


def lag_table(optimum: Optimum, mark: str) -> Table:
    table = plain("lags", "‖ρ‖", "heads each", "size", "bound", "")
    errors = lag_errors(optimum.task, optimum.groups)
    for first, last in runs(optimum):
        group = optimum.groups[first - 1]
        total = float(errors[first - 1 : last].sum())
        norms = optimum.task.profile[first - 1], optimum.task.profile[last - 1]
        shown = f"{norms[0]:.3g}" if first == last or norms[0] == norms[1] else f"{norms[0]:.3g} … {norms[1]:.3g}"
        table.add_row(
            span(first, last), shown, f"{group.heads}", f"{group.size:g}", f"{total:.4g}", mark * bar(total, errors)
        )
    if len(optimum.groups) < len(optimum.task.profile):
        rest = float(errors[len(optimum.groups) :].sum())
        lags = span(len(optimum.groups) + 1, len(optimum.task.profile))
        table.add_row(lags, "", "none", "", f"{rest:.4g}", mark * bar(rest, errors))
    return table


def runs(optimum: Optimum) -> Iterator[tuple[int, int]]:
    """Lags next to each other with the same heads: the first and the last of each."""
    for _, lags in groupby(enumerate(optimum.groups, 1), key=lambda pair: pair[1]):
        own = [lag for lag, _ in lags]
        yield own[0], own[-1]


def curve_table(optimum: Optimum, mark: str) -> Table:
    table = plain("heads", "size", "bound", "")
    m, width = len(optimum.groups), optimum.limit.width
    heads = [h for h in SHOWN if m * h <= width]
    values = curve(optimum.task, width, heads, m)
    for h, value in zip(heads, values, strict=True):
        table.add_row(f"{h}", f"{width / (m * h):.4g}", f"{value:.3f}", mark * round(BAR * value / max(values)))
    return table


def bound_data(optimum: Optimum, source: str) -> JsonObject:
    """The optimum and its whole curve, for programs."""
    m, width = len(optimum.groups), optimum.limit.width
    heads, errors = whole_curve(optimum)
    loose = relax(optimum.task, width)
    return {
        "deadweight": __version__,
        "task": {**asdict(optimum.task), "source": source},
        "rules": asdict(optimum.rules),
        "limit": {"name": optimum.limit.name, "value": optimum.limit.value, "width": width},
        "optimum": {
            "error": optimum.error,
            "lags": m,
            "heads": [g.heads for g in optimum.groups],
            "sizes": [g.size for g in optimum.groups],
            "width": optimum.width,
            "price": optimum.price,
            "floor": optimum.floor,
        },
        "relaxed": {"error": loose.error, "heads": list(loose.heads)},
        "curve": {"lags": m, "heads": heads, "error": errors},
    }


def whole_curve(optimum: Optimum) -> tuple[list[int], list[float]]:
    """Every number of heads per lag that the width allows, and the bound for each."""
    m, width = len(optimum.groups), optimum.limit.width
    heads = list(range(1, width // m + 1))
    return heads, curve(optimum.task, width, heads, m)


def plot_bound(optimum: Optimum, source: str, file: Path) -> None:
    """The U-curve, and heads by lag."""
    heads, errors = whole_curve(optimum)
    picture, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(heads, errors, color="black", linewidth=1)
    left.axhline(optimum.error, color="C0", linewidth=0.8, linestyle="--", label="best whole numbers")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set_xlabel(f"heads for each of {plural(len(optimum.groups), 'lag')}, D = {optimum.limit.width:,}")
    left.set_ylabel("error bound")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8)
    lags = range(1, len(optimum.groups) + 1)
    right.bar(lags, [g.heads for g in optimum.groups], color="C0", width=0.8)
    for lag, group in zip(lags, optimum.groups, strict=True):
        if len(optimum.groups) <= 16:
            right.annotate(f"{group.size:g}", (lag, group.heads), ha="center", va="bottom", fontsize=8)
    right.set_xlabel("lag (above the bars: size of its heads)")
    right.set_ylabel("heads")
    right.xaxis.set_major_locator(pyplot().MaxNLocator(integer=True))
    picture.suptitle(f"{source}, tokens of {optimum.task.d_token} dimensions", fontsize=10)
    save(picture, file)


def print_plan(plan: HeadPlan, source: str, console: Console) -> None:
    """Layer by layer, the plan and the model with equal heads."""
    shape = plan.shape
    console.print(f"{source}: tokens of {plan.d_token} dimensions; {shape.n_layers} layers of width {shape.d_model}\n")
    table = plain("layer", "saturation", "heads", "size", "", "attention", "KV bytes", "bound", "equal heads", "bound")
    widest = max(layer.width for layer in plan.layers)
    for i, (layer, old) in enumerate(zip(plan.layers, plan.default, strict=True)):
        table.add_row(
            f"{i}",
            f"{plan.saturation[i]:g}",
            f"{layer.heads}",
            f"{layer.size}",
            block(console) * round(BAR / 2 * layer.width / widest),
            f"{plan.parameters(layer):,}",
            f"{plan.kv_bytes(layer):,}",
            f"{layer.error:.4g}",
            f"{old.heads} × {old.size}",
            f"{old.error:.4g}",
        )
    table.add_row("all", "", "", "", "", *totals(plan, plan.layers), "", totals(plan, plan.default)[2])
    console.print(table)
    parameters, cache, _ = totals(plan, plan.default)
    console.print(f"\nequal heads everywhere: {parameters} attention parameters, {cache} KV bytes per token")
    console.print("every layer has heads of one size: the model has one d_qk and one d_v per layer")


def totals(plan: HeadPlan, layers: Sequence[PlannedLayer]) -> tuple[str, str, str]:
    error = sum(layer.error for layer in layers)
    return f"{sum(map(plan.parameters, layers)):,}", f"{sum(map(plan.kv_bytes, layers)):,}", f"{error:.4g}"


def plan_data(plan: HeadPlan, source: str) -> JsonObject:
    def side(layers: Sequence[PlannedLayer]) -> JsonObject:
        return {
            "heads": [layer.heads for layer in layers],
            "size": [layer.size for layer in layers],
            "lags": [len(layer.groups) for layer in layers],
            "parameters": [plan.parameters(layer) for layer in layers],
            "kv_bytes": [plan.kv_bytes(layer) for layer in layers],
            "error": [layer.error for layer in layers],
        }

    return {
        "deadweight": __version__,
        "profile": source,
        "shape": asdict(plan.shape),
        "rules": asdict(plan.rules),
        "d_token": plan.d_token,
        "saturation": list(plan.saturation),
        "plan": side(plan.layers),
        "equal_heads": side(plan.default),
    }


PANELS = ("heads", "size", "parameters", "kv_bytes", "error")
TITLES = ("heads", "head size", "attention parameters", "KV bytes per token", "error bound")


def plot_plan(plan: HeadPlan, source: str, file: Path) -> None:
    """One panel per quantity, layers from left to right, for the plan and for equal heads."""
    data = plan_data(plan, source)
    picture, axes = pyplot().subplots(1, len(PANELS), figsize=(15, 3), layout="constrained")
    for panel, key, title in zip(axes, PANELS, TITLES, strict=True):
        for place, (name, label) in enumerate((("plan", "plan"), ("equal_heads", "equal heads"))):
            values = data[name][key]
            panel.bar([i + 0.4 * place - 0.2 for i in range(len(values))], values, width=0.4, label=label)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(pyplot().MaxNLocator(integer=True))
    axes[0].legend(fontsize=8, loc="lower left", framealpha=1)
    picture.suptitle(f"{source}, tokens of {plan.d_token} dimensions", fontsize=10)
    save(picture, file)


def plain(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    return table


def block(console: Console) -> str:
    """The character of which bars are drawn."""
    return "#" if console.options.ascii_only else "█"


def bar(value: float, errors: NDArray[np.float64]) -> int:
    return round(BAR * value / float(errors.sum()))


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"
