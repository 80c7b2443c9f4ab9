"""The page and the figure of the study of growing key biases."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from deadweight.report.figure import pyplot, save


def values(record: dict[str, Any], name: str, key: str) -> list[float]:
    return [r[key] for r in record["runs"][name]]


def norms(record: dict[str, Any], name: str) -> list[float]:
    return [r["log"][-1][1] for r in record["runs"][name]]


def exponent(run: dict[str, Any]) -> float:
    """The slope of log norm over log steps, over the second half: ½ for a random walk, 1 for a steady drift."""
    half = [(math.log(s), math.log(n)) for s, n, *_ in run["log"][len(run["log"]) // 2 :] if n > 0]
    return float(np.polyfit(*zip(*half, strict=True), 1)[0]) if len(half) > 1 else math.nan


def spread(numbers: list[float], form: str = ".3g") -> str:
    if len(numbers) < 2:
        return f"{numbers[0]:{form}}"
    return f"{statistics.mean(numbers):{form}} ± {statistics.stdev(numbers):.1g}"


def summary(record: dict[str, Any], name: str) -> str:
    loss = spread(values(record, name, "valid_loss"), ".4f")
    if "log" not in record["runs"][name][0]:
        return f"loss {loss}"
    return f"norm {spread(norms(record, name))}, coherence {spread(values(record, name, 'coherence'))}, loss {loss}"


def gap(record: dict[str, Any], name: str, other: str) -> tuple[float, float]:
    """Mean difference of the loss over pairs of a seed, and its standard error."""
    pairs = [a - b for a, b in zip(*(values(record, n, "valid_loss") for n in (name, other)), strict=True)]
    return statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def walk(rate: float, steps: float, elements: int) -> float:
    """The norm after a random walk: every step moves every element by about the learning rate, with a random sign."""
    return rate * math.sqrt(steps * elements)


def embedded_walk(told: dict[str, Any]) -> float:
    """The same for the embedded model, whose learning rate fell along half a cosine: the mean of its square is 3/8."""
    s = told["settings"]
    return walk(s["lr"] * math.sqrt(3 / 8), s["steps"], 192 * len(told["norms"]))


INTRODUCTION = """\
# Why key biases grow that change nothing

This page tests why key biases grow in training although they change nothing, and what that costs.

Without rotary positions a key bias has no effect: it adds the same number to all scores of a query, and softmax removes
it. Over the real numbers its gradient is zero. Yet the key biases of the embedded model have a norm of {norm:.0f}.
`studies/s1_key_drift.py` trains a small model ({layers} layers, width {width},
context {context}, {steps:,} steps of {bytes} bytes, constant learning rate {rate:g}, {seeds} seeds) in several
precisions and with several optimisers.

## Verdicts

"""


def written(record: dict[str, Any]) -> str:
    s, told = record["setting"], record["embedded"]
    total = math.hypot(*told["norms"])
    head = INTRODUCTION.format(
        norm=total,
        layers=s["n_layers"],
        width=s["d_model"],
        context=s["context"],
        steps=s["steps"],
        bytes=s["batch"] * s["context"],
        rate=s["rate"],
        seeds=s["seeds"],
    )
    return head + "\n".join([*verdicts(record), "", *condition_table(record), "", *cost_table(told), ""])


def verdicts(record: dict[str, Any]) -> list[str]:
    s, told = record["setting"], record["embedded"]
    mean = lambda name: statistics.mean(norms(record, name))  # noqa: E731
    sums = [
        x
        for n in record["runs"]
        if "GPU" not in n and "log" in record["runs"][n][0]
        for x in values(record, n, "gradient_sum")
    ]
    walked = walk(s["rate"], s["steps"], s["d_model"] * s["n_layers"])
    cost = [gap(record, n, f"{n}, no key bias") for n in ("float32", "bfloat16")]
    positive = sum(x > 0 for x in told["alignment"])
    sizes = {n: [abs(x) for r in record["runs"][n] for x in r.get("alignment", [])] for n in record["runs"]}
    ends, bits = {n: mean(n) for n in record["runs"] if "log" in record["runs"][n][0]}, told["bits"]
    noise = ends["float64"] < ends["float64, ε 1e-30"] / 1000 and ends["bfloat16, SGD"] < ends["bfloat16"] / 100
    explained = math.hypot(*told["norms"]) < 2 * embedded_walk(told)
    change = {n: row["zeroed"] - row["as trained"] for n, row in bits.items()}
    return [
        f"- *Adam turns rounding noise into steps.* **{said(noise)}.** In float64 the norm ends at "
        f"{ends['float64']:.1g}; with an ε of 1e-30 instead of 1e-8, and nothing else changed, at "
        f"{ends['float64, ε 1e-30']:.2g}. Rounding in float32 gives {ends['float32']:.2g}, in bfloat16 "
        f"{ends['bfloat16']:.2g}; with SGD they stay at {ends['float32, SGD']:.1g} and {ends['bfloat16, SGD']:.1g}.",
        f"- *A larger ε stops it.* **{said(ends['bfloat16, ε 1e-3'] < ends['bfloat16'] / 100)}.** Once ε exceeds the "
        "noise, each factor of ten in ε takes about a factor of "
        f"ten from the norm: in bfloat16 {ends['bfloat16, ε 1e-6']:.2g} at 1e-6, {ends['bfloat16, ε 1e-4']:.2g} at "
        f"1e-4, {ends['bfloat16, ε 1e-3']:.2g} at 1e-3.",
        f"- *Weight decay on biases stops it.* **{said(ends['bfloat16, decay 0.1'] < ends['bfloat16'] / 2)}.** With a "
        "decay of 0.1 the norm is "
        f"{ends['float32, decay 0.1']:.2g} in float32 and {ends['bfloat16, decay 0.1']:.2g} in bfloat16: rate × decay "
        f"× steps is only {s['rate'] * 0.1 * s['steps']:.1f}.",
        f"- *The noise has a preferred direction.* **{said(statistics.mean(sums) > 2)}.** The sum of all gradients of "
        "a run is "
        f"{statistics.mean(sums):.2f} times as long as it would be with random signs ({min(sums):.2f} to "
        f"{max(sums):.2f}). The norm is that of a random walk: {walked:.2f} by rate × √(steps × elements), "
        f"{ends['bfloat16']:.2f} in bfloat16. The walk follows the mean query, forwards or backwards: |cosine| "
        f"{statistics.mean(sizes['bfloat16']):.2f} in bfloat16, where random directions have about 0.14.",
        f"- *A random walk explains the embedded model.* **{said(explained)}.** A random walk with its settings would "
        f"end at {embedded_walk(told):.0f}, not at {math.hypot(*told['norms']):.0f}, and in {positive} of its "
        f"{len(told['alignment'])} heads the key bias points along the mean query (cosine {min(told['alignment']):.2f} "
        f"to {max(told['alignment']):.2f}). It was trained in bfloat16 on a GPU. {gpu_words(record)}",
        f"- *What it costs in training.* With and without a key bias the loss differs by {cost[0][0]:+.4f} ± "
        f"{cost[0][1]:.4f} nats in float32 and {cost[1][0]:+.4f} ± {cost[1][1]:.4f} in bfloat16 (standard error of "
        f"{s['seeds']} pairs). These runs leave a plateau at different times, so small effects are not seen.",
        "- *What it costs afterwards.* Zeroing the key biases changes nothing in float64. The embedded model then has "
        f"{change['bfloat16']:+.4f} bits per byte in bfloat16, {change['keys in 8 bits']:+.4f} with keys of 8 bits and "
        f"{change['keys in 4 bits']:+.4f} with keys of 4 bits: a large constant uses up the digits that tell keys "
        "apart. `deadweight reduce` zeroes them.",
    ]


def said(holds: bool) -> str:
    return "Holds" if holds else "Not seen here"


def gpu_words(record: dict[str, Any]) -> str:
    """What runs on a GPU say about a preferred direction, if there are any."""
    runs = record["runs"].get("bfloat16, GPU")
    if not runs:
        return "Rounding there may have a preferred direction; that was not tested here."
    aligned = [x for r in runs for x in r["alignment"]]
    positive = sum(x > 0 for x in aligned)
    return (
        f"The same small model trained there in bfloat16 ends at a norm of {spread(norms(record, 'bfloat16, GPU'))} "
        f"(float32: {spread(norms(record, 'float32, GPU'))}), with a sum of gradients of "
        f"{spread(values(record, 'bfloat16, GPU', 'gradient_sum'))}; it points along the mean query in {positive} of "
        f"{len(aligned)} heads."
    )


def condition_table(record: dict[str, Any]) -> list[str]:
    s = record["setting"]
    lines = [
        "## The runs",
        "",
        f"Python's manual, bytes; torch {s['torch']}, {s['machine']}. Mean ± standard deviation over {s['seeds']} "
        "seeds. *Exponent*: slope of log norm over log steps in the second half (½: random walk, 1: drift). *Sum of "
        "gradients*: its length over that of random signs. *Gradient*: ‖∂b_K‖/‖∂b_Q‖ at the last logged step. The loss "
        "is in nats per byte; a constant learning rate leaves it noisy.",
        "",
        "| condition | ‖b_K‖ | exponent | sum of gradients | gradient | loss |",
        "| --- " * 6 + "|",
    ]
    for name, runs in record["runs"].items():
        loss = spread(values(record, name, "valid_loss"), ".4f")
        if "log" not in runs[0]:
            lines.append(f"| {name} | – | – | – | – | {loss} |")
            continue
        ratio = [r["log"][-1][2] / r["log"][-1][3] for r in runs]
        cells = [
            spread(norms(record, name), ".2g"),
            spread([exponent(r) for r in runs], ".2f"),
            spread(values(record, name, "gradient_sum"), ".2f"),
            f"{statistics.mean(ratio):.1e}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {loss} |")
    return [*lines, "", "![norm of the key bias over steps](key-drift.svg)"]


def cost_table(told: dict[str, Any]) -> list[str]:
    lines = [
        "## The embedded model with and without its key biases",
        "",
        f"Norms by layer: {', '.join(f'{n:.0f}' for n in told['norms'])}. Bits per byte of embedded prose; rounded "
        "keys have one scale per token.",
        "",
        "| precision | as trained | key biases zeroed | difference |",
        "| --- " * 4 + "|",
    ]
    for name, row in told["bits"].items():
        lines.append(
            f"| {name} | {row['as trained']:.4f} | {row['zeroed']:.4f} | {row['zeroed'] - row['as trained']:+.4f} |"
        )
    return lines


def figure(record: dict[str, Any], file: Path) -> None:
    """Norm over steps, one line per condition: the mean over seeds, with all seeds as a band."""
    picture, axes = pyplot().subplots(figsize=(7.5, 4.4), layout="constrained")
    chosen = [n for n in record["runs"] if "log" in record["runs"][n][0] and "decay" not in n]
    for name in chosen:
        runs = record["runs"][name]
        at = [line[0] for line in runs[0]["log"]]
        each = np.array([[line[1] for line in r["log"]] for r in runs])
        (line,) = axes.plot(at, each.mean(0), label=name, linewidth=1)
        axes.fill_between(at, each.min(0), each.max(0), color=line.get_color(), alpha=0.15)
    s = record["setting"]
    grid = np.linspace(s["steps"] / 20, s["steps"], 50)
    walked = [walk(s["rate"], n, s["d_model"] * s["n_layers"]) for n in grid]
    axes.plot(grid, walked, color="black", linestyle=":", label="random walk")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("norm of the key biases")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(picture, file)
