"""The large size of the query study: tables, open questions, and the figure of both sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import s2_large as large
from paired import Bits, Difference
from s2_claims import FIRST_LONG, Large, gain_at_optimum, millions

CONTEXT = large.SIZES["context"]


def spread(bits: Bits) -> str:
    """Mean ± standard deviation over seeds, or a note that there is one seed."""
    values = list(bits.values())
    if len(values) < 2:
        return f"{values[0]:.4f} (one seed)" if values else "–"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def shown(difference: Difference | None) -> str:
    return "–" if difference is None else str(difference)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "| --- " * len(head) + "|",
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


def section(record: Large) -> list[str]:
    """The tables of the large size."""
    s, sizes = record.settings[0], record.settings[0]["sizes"]
    return [
        "## 38 M parameters",
        "",
        f"{sizes['n_layers']} layers of width {sizes['d_model']}, {sizes['heads']} heads, context {sizes['context']}, "
        f"steps of {s['batch'] * sizes['context']:,} bytes of {s['text']} (the first 90 M bytes; judged on the next 5 "
        f"M, short runs on {large.QUICK // 10**6} M of those), AdamW, clip 1, weight decay {large.DECAY:g}, warm-up "
        f"over a tenth of the steps, then a cosine to a tenth; bfloat16, {s['machine']}, torch {s['torch']}. Runs of "
        "one seed start with the same weights, as far as both shapes have them, and see the same text in the same "
        "order. GPU kernels do not fix the order of their sums: a rerun of a seed need not agree to the bit, and how "
        "much reruns differ was not measured. There was time for 67 M bytes of two shapes instead of 157 M of all. "
        "After the first pair, the other seeds of full and identity Q were run before identity K and V.",
        "",
        "Bits per byte of held-out text, mean ± standard deviation over three seeds; *to full* is the mean "
        "difference to the full shape over pairs of one seed, ± standard error.",
        "",
        *table(*losses(record)),
        *learning_rates(record),
        *scales(record),
        *costs(record),
        *first_go(record),
    ]


def losses(record: Large) -> tuple[list[str], list[list[str]]]:
    lengths = [n for n in (large.SHORT, large.MIDDLE, large.LONG) if record.bits("full", n)]
    head = ["shape", "non-embedding", *(x for n in lengths for x in (f"{millions(n)}, rate", "bits", "to full"))]
    rows = []
    for shape in large.SHAPES:
        if not any(record.bits(shape, n) for n in lengths):
            continue
        row = [shape, f"{record.shapes[shape]['non_embedding']:,}"]
        for n in lengths:
            bits, rate = record.bits(shape, n), record.rate(shape, n)
            row += [f"{rate:g}" if bits else "–", spread(bits), "" if shape == "full" else shown(record.gap(shape, n))]
        rows.append(row)
    return head, rows


def learning_rates(record: Large) -> list[str]:
    """The sweeps, and the gain that the parabola predicts for a finer grid."""
    rates = sorted({rate for swept in record.swept.values() for rate in swept})
    head = ["shape", *(f"{rate:g}" for rate in rates), "optimum", "gain there"]
    rows = []
    for shape, swept in record.swept.items():
        if swept and not large.rates_to_try(swept):
            cells = [f"{swept[r] / math.log(2):.4f}" if r in swept else "–" for r in rates]
            rows.append([shape, *cells, f"{large.optimum(swept):g}", f"{gain_at_optimum(swept):.4f}"])
    return [
        f"Learning rates, one seed, {millions(large.SHORT)}. The optimum is the vertex of the parabola through the "
        "best rate and its neighbours; the gain is the predicted improvement over the best rate of the grid. The "
        f"runs of {millions(large.SHORT)} above used the best rate of the grid, longer ones the optimum × (ratio of "
        f"steps)^{large.LAW:g} (arXiv 2409.19913). This scaling was not checked here.",
        "",
        *table(head, rows),
    ]


def scales(record: Large) -> list[str]:
    rows = []
    for shape in large.SHAPES:
        bits = record.bits(shape, large.SHORT, scale=0.5)
        if bits:
            rows.append([shape, spread(record.bits(shape, large.SHORT)), spread(bits), shown(record.half_scale(shape))])
    if not rows:
        return []
    return [
        f"Half the attention scale, {millions(large.SHORT)}, at the learning rate of the full scale:",
        "",
        *table(["shape", "1/√d", "1/(2√d)", "difference"], rows),
    ]


def costs(record: Large) -> list[str]:
    """How equal FLOPs and equal seconds would change the comparison."""
    base, rows = record.speed("full"), []
    for shape in large.CORE[1:]:
        longest, speed = record.longest_gap(shape), record.speed(shape)
        if longest is None or base is None or speed is None:
            continue
        steps, gap = longest
        cost, time = record.flops(shape), base / speed
        row = [shape, millions(steps), str(gap), f"{cost:.3f}", f"{time:.3f}"]
        for less in (cost, time):
            low, high = record.worth(steps, less)
            row.append(f"{gap.mean - high:+.4f} to {gap.mean - low:+.4f}")
        rows.append(row)
    head = ["shape", "after", "equal bytes", "FLOPs per byte", "seconds per byte", "equal FLOPs", "equal seconds"]
    pairs = {r: f"{record.side_by_side[r]:.2f}" for r in record.side_by_side}
    tried = "; ".join(f"{size:,} bytes a step: {gain}" for size, gain in pairs.items())
    return [
        "Comparison at equal FLOPs and equal seconds. The last two columns are an estimate, not a measurement. A "
        "shape that costs less per byte could be trained on more text for the same cost; the gain from that text is "
        "estimated from the slope of the full shape's loss over text. The slope comes from a power law through its "
        "two lengths (which are judged on different amounts of text), above an asymptote between 0 and 1.2 bits. The "
        "range shown is that of the slope; the error of the difference is not included. Seconds are those of steps "
        "of 65,536 bytes, one training at a time.",
        "",
        *table(head, rows),
        f"Speed of two trainings side by side, divided by that of one: {tried} (measured while other shapes were "
        "compiling). The runs of this page shared the GPU, two or three at a time; one training used at most "
        f"{max(r['gigabytes'] for r in record.runs):.1f} GB.",
        "",
    ]


def first_go(record: Large) -> list[str]:
    """Attempts that failed."""
    ends = {r["graph"]: r for r in record.pilot if r["steps"] >= FIRST_LONG}
    if not {"full", "identity Q"} <= ends.keys():
        return []
    told = {s: (ends[s]["member"]["learning_rate"], large.loss_of(ends[s]) / math.log(2)) for s in ends}
    (rate, full), (other_rate, other) = told["full"], told["identity Q"]
    short = [large.loss_of(r) / math.log(2) for r in record.pilot if r["steps"] < FIRST_LONG]
    return [
        "A first attempt used 65,536 bytes a step and a warm-up over a twentieth of the steps. Its sweeps of 304 "
        f"steps ended at {min(short):.1f} to {max(short):.1f} bits per byte, on the plateau before the loss falls. "
        "For this reason steps, warm-up, rates and lengths were changed, with these results known. The rates that "
        f"those sweeps chose for 157 M bytes differ between shapes: full ended at {full:.4f} (rate {rate:g}), "
        f"identity Q at {other:.4f} (rate {other_rate:g}), one seed each. The difference is {other - full:+.4f}, with "
        "the opposite sign of that above. With one seed it is not judged. Whether the rates, the size of the steps "
        "or the length change the sign is open. The record is `studies/s2_large_pilot.jsonl`; the speeds above are "
        "from it.",
        "",
    ]


def open_points(record: Large) -> list[str]:
    """Questions that the record does not answer yet."""
    checked = any(record.bits(s, large.MIDDLE, factor=2.0) for s in ("full", "identity Q"))
    points = [
        (
            not checked,
            f"Whether the learning rates after {millions(large.MIDDLE)} are right for each shape; the errors above do "
            "not include their choice. Runs at twice the rate are next in the plan.",
        ),
        (
            not all(len(record.bits(s, large.MIDDLE)) >= 3 for s in large.CORE),
            f"Identity K and V after {millions(large.MIDDLE)}.",
        ),
        (not record.bits("full", large.LONG), f"All shapes after {millions(large.LONG)}, and a measured slope there."),
        (
            len(record.bits("identity Q, larger MLP", large.SHORT)) < 3,
            "Query weights moved to the MLP at 38 M parameters: swept for identity Q on one seed, so not judged.",
        ),
        (
            True,
            "Weight decay at 38 M parameters: not run. Over the longest runs here a decay of 0.1 alone would shrink a "
            f"weight by {shrinkage(record):.0%} at most; the published runs are longer.",
        ),
        (True, "Identity Q and V together, a scale of 2/√d and a learned scale at 38 M parameters: not run."),
    ]
    go_on = (
        "This series is finished. `studies/large.py` goes on with these questions and sweeps the learning rate at the "
        "length that is judged; its results stand in [at-scale](at-scale.md)."
    )
    return ["## What is open", "", *(f"- {words}" for is_open, words in points if is_open), "", go_on, ""]


def shrinkage(record: Large) -> float:
    """An upper bound of 1 − Π (1 − rate·decay) over the middle run of the full shape, for a constant rate."""
    return 1 - (1 - (record.rate("full", large.MIDDLE) or 0.0) * large.DECAY) ** large.MIDDLE


def draw(axes: Any, record: Large, small: Mapping[str, Difference]) -> None:
    """Left: differences to full at both sizes. Right: identity Q and full during training."""
    left, right = axes
    shapes = [s for s in large.SHAPES if s != "full" and (s in small or record.longest_gap(s))]
    series = {"4.7 M parameters, 10 M bytes": {s: small.get(s) for s in shapes}}
    for steps in (large.SHORT, large.MIDDLE, large.LONG):
        series[f"38 M parameters, {millions(steps)}"] = {s: record.gap(s, steps) for s in shapes}
    for place, (name, differences) in enumerate(series.items()):
        points = [(i + 0.18 * (place - 1), d) for i, s in enumerate(shapes) if (d := differences[s]) is not None]
        if points:
            errors = [d.margin for _, d in points]
            left.errorbar(
                [d.mean for _, d in points], [y for y, _ in points], xerr=errors, fmt="osD^"[place], label=name
            )
    left.axvline(0, color="grey", linewidth=0.8)
    left.set_yticks(range(len(shapes)), shapes, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("bits per byte above full, with 95 % intervals")
    left.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    draw_training(right, record)


def draw_training(axes: Any, record: Large) -> None:
    bits = {s: curves(record, s) for s in ("full", "identity Q")}
    at, full = bits["full"]
    _, other = bits["identity Q"]
    seeds = min(len(full), len(other))
    speeds = [record.speed(s) for s in ("full", "identity Q")]
    costs = {"equal bytes": 1.0, "equal FLOPs": record.flops("identity Q")}
    if speeds[0] and speeds[1]:
        costs["equal seconds"] = speeds[0] / speeds[1]
    for name, cost in costs.items():
        gaps = np.array([np.interp(at, at * cost, other[i]) - full[i] for i in range(seeds)])
        inside = (at <= at[-1] * cost) & (at > 0.2 * at[-1])
        mean, error = gaps.mean(0), gaps.std(0, ddof=1) / math.sqrt(seeds)
        axes.errorbar(at[inside] / 1e6, mean[inside], yerr=2 * error[inside], label=name, linewidth=1, elinewidth=0.6)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("millions of bytes that full has seen")
    axes.set_ylabel("training loss of identity Q above full, bits per byte")
    axes.legend(fontsize=7)


def curves(record: Large, shape: str) -> tuple[Any, list[Any]]:
    """Bytes, and the training loss of every seed, of the middle runs."""
    rate = record.rate(shape, large.MIDDLE)
    runs = [
        r for r in record.runs if (r["graph"], r["steps"], r["member"]["learning_rate"]) == (shape, large.MIDDLE, rate)
    ]
    runs.sort(key=lambda r: r["member"]["seed"])
    at = np.array(runs[0]["at"], dtype=float) * large.BATCH * CONTEXT
    return at, [np.array(r["train_loss"]) / math.log(2) for r in runs]
