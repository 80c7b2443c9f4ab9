"""Heads against their size: the published bound, its optimum, and a 4-gram that attention has to learn.

Published (arXiv 2510.03784): for a budget D = Σ H_m·d_m the error bound is U-shaped in the number of heads, with its
minimum at 8 heads for D = 128; and a layer trained on a 4-gram with D = 256 does best at "8 heads", which is said to be
the optimum M = 4, d_m = 8, H_m = 8. Whether that axis counts heads per lag or in total is not known here.

1. The curve for D = 128, by `deadweight.allocate`.
2. The optimum for the 4-gram, and how far the task may be from the ideal one before it is another.
3. The 4-gram, trained. Tokens x_t ∈ R^d are white noise, y_t = ½ Σ_{m≤4} Q_m x_{t−m} with random orthogonal Q_m, so
   that all four lags matter alike and the outputs have variance one. One layer of attention with N heads of size D/N,
   without norms, biases or a skip, maps x to y; fresh sequences in every step; the first four places are not counted.
   Two kinds of scores: *standard* (queries and keys of x·E + a learned place, so that where a head looks takes up head
   size too), and *by lag* (each head has a table of scores by lag and nothing else, as the bound has it: size is for
   values alone). N runs from 1 to 128: N = 1 … 32 is the published axis read as heads in total, N = 4 … 128 per lag.

    python studies/s3_allocation.py run --out studies/s3_allocation.json
    python studies/s3_allocation.py report studies/s3_allocation.json --markdown docs/allocation.md
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from deadweight.allocate.bound import HeadGroup, Task, curve
from deadweight.allocate.constraints import Rules
from deadweight.allocate.solver import solve
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, save_record
from deadweight.threads import one_thread

app = typer.Typer(add_completion=False, help=__doc__)
CURVE = {1: 1.326, 8: 0.166, 9: 0.481, 10: 0.580, 20: 0.841, 80: 0.965}  # published, D = 128
TRAINED = {1: 0.3197, 2: 0.3174, 4: 0.1129, 8: 0.0167, 16: 0.0234, 32: 0.0559}  # published, D = 256, validation
LAGS, CLAIMED = 4, (HeadGroup(8, 8),) * 4
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
READINGS = {"in total": 1, "per lag": LAGS}  # heads in total for one on the published axis
SCORES = ("standard", "by lag")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    steps: int = 600
    batch: int = 32
    length: int = 16
    budget: int = 256  # D
    stream: int = 64  # width of x·E + place
    judged: int = 512  # sequences of the validation
    warmup: int = 50
    sizes: tuple[int, ...] = (8, 32)  # d, numbers in a token
    rates: tuple[float, ...] = (3e-3, 1e-2)  # of standard scores, and by lag


def kernels(d: int, seeds: int) -> Tensor:
    """½ Q_m: seeds × lags × d × d."""
    random = torch.Generator().manual_seed(1000 + d)
    return torch.linalg.qr(torch.randn(seeds, LAGS, d, d, generator=random))[0] / LAGS**0.5


def sequences(kernel: Tensor, n: int, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """White noise and its 4-gram, for every seed: seeds × n × length × d."""
    seeds, _, d, _ = kernel.shape
    x = torch.randn(seeds, n, length, d, generator=random)
    y = sum(F.pad(x, (0, 0, m, 0))[:, :, :length] @ kernel[:, None, m - 1].mT for m in range(1, LAGS + 1))
    return x, torch.as_tensor(y)


def first_weights(scores: str, heads: int, d: int, s: Settings) -> Weights:
    """Random weights of variance 1/inputs, stacked over seeds."""
    size = s.budget // heads

    def drawn(seed: int) -> Weights:
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape, fan: torch.randn(*shape, generator=random) * fan**-0.5  # noqa: E731
        into = s.stream if scores == "standard" else d
        weights = {"value": normal(into, heads, size, fan=into), "out": normal(heads, size, d, fan=s.budget)}
        if scores == "by lag":
            return weights | {"table": normal(heads, s.length, fan=4)}
        weights |= {name: normal(into, heads, size, fan=into) for name in ("query", "key")}
        return weights | {"embed": normal(d, into, fan=d), "place": normal(s.length, into, fan=1)}

    each = [drawn(seed) for seed in range(s.seeds)]
    return {name: torch.stack([w[name] for w in each]).requires_grad_() for name in each[0]}


def layer(w: Weights, x: Tensor) -> Tensor:
    """One layer of causal attention, for all seeds at once."""
    length = x.shape[2]
    if "table" in w:
        lag = torch.arange(length)[:, None] - torch.arange(length)
        scores = w["table"][:, :, lag.clamp(min=0)].masked_fill(lag < 0, -torch.inf)
        values = torch.einsum("sbti,sihk->sbthk", x, w["value"])
        seen = torch.einsum("shtu,sbuhk->sbthk", scores.softmax(-1), values)
        return torch.einsum("sbthk,shki->sbti", seen, w["out"])
    z = x @ w["embed"][:, None] + w["place"][:, None]
    q, k, v = (torch.einsum("sbti,sihk->sbhtk", z, w[name]) for name in ("query", "key", "value"))
    return torch.einsum("sbhtk,shki->sbti", F.scaled_dot_product_attention(q, k, v, is_causal=True), w["out"])


def errors(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The mean square error of every seed, relative to the outputs, where all lags are in the sequence."""
    off, whole = (layer(w, x) - y)[:, :, LAGS:], y[:, :, LAGS:]
    return off.square().mean((1, 2, 3)) / whole.square().mean((1, 2, 3))


def trained(scores: str, heads: int, d: int, s: Settings) -> dict[str, Any]:
    """The error of every seed on new sequences, after training."""
    kernel, w = kernels(d, s.seeds), first_weights(scores, heads, d, s)
    rate, random = s.rates[SCORES.index(scores)], torch.Generator().manual_seed(7)
    optimizer = torch.optim.Adam(w.values(), lr=rate)
    start = time.perf_counter()
    for step in range(s.steps):
        factor = min(1.0, (step + 1) / s.warmup) * (0.5 + 0.5 * math.cos(math.pi * step / s.steps))
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        errors(w, *sequences(kernel, s.batch, s.length, random)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        judged = errors(w, *sequences(kernel, s.judged, s.length, torch.Generator().manual_seed(8)))
    told = {"scores": scores, "heads": heads, "size": s.budget // heads, "d": d}
    return {**told, "errors": judged.tolist(), "seconds": round(time.perf_counter() - start, 1)}


def holds(task: Task, width: int = 256, rules: Rules | None = None) -> bool:
    return solve(task, width, rules).groups == CLAIMED


def last_that_holds(test: Callable[[float], bool], low: float, high: float) -> float:
    """Bisect between a value at which the test holds and one at which it does not."""
    assert test(low) and not test(high)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if test(middle) else (low, middle)
    return low


def decaying(exponent: float) -> Task:
    return Task(tuple(m**-exponent for m in range(1, LAGS + 1)), 8)


def conditions() -> dict[str, Any]:
    """Where the optimum is the claimed one, and what it is elsewhere."""
    others = {
        **{f"tokens of {d} numbers": (Task((1.0,) * 4, d), 256) for d in (4, 7, 9, 16, 32)},
        **{f"{n} lags alike": (Task((1.0,) * n, 8), 256) for n in (3, 5, 8, 32)},
        "D = 248": (Task((1.0,) * 4, 8), 248),
        "‖ρ_m‖ = 1/m": (decaying(1.0), 256),
    }
    further = lambda rest: Task((1.0,) * 4 + (rest,), 8)  # noqa: E731
    return {
        "claimed": holds(Task((1.0,) * 4, 8)),
        "with_epsilon": holds(Task((1.0,) * 4, 8, epsilon=0.5)),
        "multiple_of_8_and_one_size": holds(Task((1.0,) * 4, 8), rules=Rules(multiple=8, one_size=True)),
        "exponent": last_that_holds(lambda a: holds(decaying(a)), 0.0, 2.0),
        "fifth_lag": last_that_holds(lambda r: holds(further(r)), 0.0, 1.0),
        "others": {name: optimum(*args) for name, args in others.items()},
    }


def optimum(task: Task, width: int) -> dict[str, Any]:
    best = solve(task, width)
    return {"groups": [[g.heads, g.size] for g in best.groups], "error": best.error}


@app.command()
def run(
    out: OutOption,
    seeds: Annotated[int, typer.Option(help="Seeds of every trained layer.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of every trained layer.")] = 600,
    most: Annotated[int, typer.Option(help="Largest number of heads.")] = 128,
) -> None:
    """Compute, train, and write the record."""
    s = Settings(seeds=seeds, steps=steps)
    record: dict[str, Any] = {
        "setting": {**asdict(s), "precision": "float32, one thread", **circumstances()},
        "curve": dict(enumerate(curve(Task((1.0,), 16), 128, range(1, 129)), 1)),
        "bound": {str(h): curve(Task((1.0,) * 4, 8), 256, [h], LAGS)[0] for h in TRAINED},
        "conditions": conditions(),
        "trained": [],
    }
    with one_thread():
        for d in s.sizes:
            for scores in SCORES:
                for heads in (h for h in HEADS if h <= most):
                    record["trained"].append(trained(scores, heads, d, s))
                    print(record["trained"][-1], flush=True)
                    save_record(out, record)


def written(record: dict[str, Any]) -> str:
    s = record["setting"]
    return "\n".join(
        [
            "# Heads against their size: the bound, its optimum, and a 4-gram",
            "",
            "This page tests what the error bound of arXiv 2510.03784 says about the number and the size of heads: its "
            "published values, its optimum, and layers trained on a 4-gram task.",
            "",
            "## Verdicts",
            "",
            *verdicts(record),
            "",
            f"Written by `studies/s3_allocation.py` from its record: {s['seeds']} seeds, torch {s['torch']}, "
            f"{s['machine']}, {sum(t['seconds'] for t in record['trained']) / 60:.0f} minutes.",
            "",
            *curve_part(record),
            "",
            *condition_part(record),
            "",
            *trained_part(record),
            "",
            "![the curve, and the 4-gram](allocation.svg)",
            "",
        ]
    )


def curve_part(record: dict[str, Any]) -> list[str]:
    bounds = {int(h): e for h, e in record["curve"].items()}
    best = min(bounds, key=lambda h: bounds[h])
    return [
        "## The curve for D = 128",
        "",
        "    deadweight allocate bound --budget 128 --token-dim 16",
        "",
        "One lag, ‖ρ‖B = 1, d = 16, ε = 0. The head size d_m = 128/H is not rounded; with whole sizes H = 9 would give "
        "0.501.",
        "",
        "| heads | " + " | ".join(map(str, CURVE)) + " |",
        "| --- " * (len(CURVE) + 1) + "|",
        "| published | " + " | ".join(f"{e:.3f}" for e in CURVE.values()) + " |",
        "| here | " + " | ".join(f"{bounds[h]:.3f}" for h in CURVE) + " |",
        "",
        f"The minimum of the whole curve is at {best} heads, {bounds[best]:.4f}.",
    ]


def condition_part(record: dict[str, Any]) -> list[str]:
    c = record["conditions"]
    lines = [
        "## The optimum for the 4-gram, D = 256",
        "",
        "    deadweight allocate bound --budget 256 --token-dim 8 --lags 4",
        "",
        "Four lags of equal weight and tokens of 8 numbers: is the exact optimum M = 4, d_m = 8, H_m = 8? "
        f"{yes(c['claimed'])}. With ε = 0.5? {yes(c['with_epsilon'])}. With sizes that are multiples of 8 and all the "
        f"same? {yes(c['multiple_of_8_and_one_size'])}. H_m counts heads per lag: 32 in total. It stays the optimum "
        f"while ‖ρ_m‖ falls no faster than m^−{c['exponent']:.3f} over the four lags, and while a fifth lag has no "
        f"more than {c['fifth_lag']:.3f} of the weight of each of the others. The size of a token determines the size "
        "of the heads, the profile of lags their number:",
        "",
        "| otherwise as above, but | best heads × size by lag | bound |",
        "| --- | --- | --- |",
    ]
    for name, told in c["others"].items():
        told_as = name.replace("alike", "of equal weight")
        lines.append(f"| {told_as} | {', '.join(f'{h} × {d}' for h, d in told['groups'])} | {told['error']:.3f} |")
    return lines


def yes(holds: bool) -> str:
    return "Yes" if holds else "No"


def trained_errors(record: dict[str, Any], scores: str, d: int) -> dict[int, list[float]]:
    return {t["heads"]: t["errors"] for t in record["trained"] if t["scores"] == scores and t["d"] == d}


def kinds(record: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted({(t["scores"], t["d"]) for t in record["trained"]}, key=lambda k: (SCORES.index(k[0]), k[1]))


def trained_part(record: dict[str, Any]) -> list[str]:
    s = record["setting"]
    lines = [
        "## The 4-gram, trained",
        "",
        "The task: y_t = ½ Σ_m Q_m x_(t−m), m = 1 … 4, x_t ∈ R^d white noise, Q_m random orthogonal. One layer of "
        f"causal attention, N heads of size {s['budget']}/N for queries, keys and values, no norm, bias or skip; "
        f"sequences of {s['length']}, {s['batch']} fresh ones a step, {s['steps']} steps of Adam (learning rate "
        f"{s['rates'][0]:g} for standard scores, {s['rates'][1]:g} by lag; warm-up {s['warmup']}, cosine). *Standard* "
        f"scores are products of queries and keys, computed from x·E plus a learned position embedding, {s['stream']} "
        "wide. Scores *by lag* come from a learned table per head, so that the size of a head is that of its values, "
        f"as in the bound. The table shows the mean squared error relative to the outputs, on {s['judged']} new "
        f"sequences: mean ± standard deviation over {s['seeds']} seeds.",
        "",
        "| N heads | size | " + " | ".join(f"{scores}, d = {d}" for scores, d in kinds(record)) + " |",
        "| --- " * (2 + len(kinds(record))) + "|",
    ]
    for heads in sorted({t["heads"] for t in record["trained"]}):
        cells = [spread(trained_errors(record, *kind).get(heads, [])) for kind in kinds(record)]
        lines.append(f"| {heads} | {s['budget'] // heads} | {' | '.join(cells)} |")
    return [*lines, "", *reading_part(record)]


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{short(statistics.mean(values))} ± {short(statistics.stdev(values) if len(values) > 1 else 0.0)}"


def short(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if 0 < value < 10 else f"{value:,.0f}"


def reading_part(record: dict[str, Any]) -> list[str]:
    """The published axis under both readings."""
    lines = [
        "Whether the published axis counts heads in total or heads per lag is not known here. Below are the "
        "published errors, and ours under both readings. The best number of heads is bold. *Ends* are the errors at "
        "the first and the last number of heads, divided by the best one. ρ is the rank correlation with the "
        "published errors.",
        "",
        "| | " + " | ".join(map(str, TRAINED)) + " | ends | ρ |",
        "| --- " * (len(TRAINED) + 3) + "|",
        row("published", Read(tuple(TRAINED.values()))),
        row("the bound, heads per lag", Read(tuple(record["bound"][str(h)] for h in TRAINED))),
    ]
    return lines + [row(f"{said(kind)}, heads {name}", reading) for (kind, name), reading in readings(record).items()]


@dataclass(frozen=True)
class Read:
    """Errors at the positions of the published axis."""

    values: tuple[float, ...]

    @property
    def best(self) -> int:
        return list(TRAINED)[self.values.index(min(self.values))]

    @property
    def ends(self) -> tuple[float, float]:
        return self.values[0] / min(self.values), self.values[-1] / min(self.values)

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation with the published errors."""
        ranks = [[sorted(v).index(x) for x in v] for v in (self.values, tuple(TRAINED.values()))]
        return statistics.correlation(*ranks)


def readings(record: dict[str, Any]) -> dict[tuple[tuple[str, int], str], Read]:
    """Our mean errors, for each kind of layer and each reading with all its runs."""
    reads = {}
    for kind in kinds(record):
        means = {h: statistics.mean(v) for h, v in trained_errors(record, *kind).items()}
        for name, factor in READINGS.items():
            if all(factor * h in means for h in TRAINED):
                reads[kind, name] = Read(tuple(means[factor * h] for h in TRAINED))
    return reads


def row(name: str, read: Read) -> str:
    cells = [f"**{short(v)}**" if v == min(read.values) else short(v) for v in read.values]
    ends = " and ".join(f"{short(e)} ×" for e in read.ends)
    shown = "" if name == "published" else f"{read.correlation:.2f}"
    return f"| {name} | {' | '.join(cells)} | {ends} | {shown} |"


def verdicts(record: dict[str, Any]) -> list[str]:
    bounds = {int(h): e for h, e in record["curve"].items()}
    exact = all(round(bounds[h], 3) == e for h, e in CURVE.items())
    lines = [
        "| claim | found | verdict |",
        "| --- | --- | --- |",
        f"| six values of the curve for D = 128 | to three digits: {yes(exact)} | {'holds' if exact else 'fails'} |",
        f"| it is U-shaped, lowest at 8 heads | falls to 8 and rises from there: {yes(u_shaped(bounds))} | "
        f"{'holds' if u_shaped(bounds) else 'fails'} |",
        "| the optimum for the 4-gram is M = 4, d_m = 8, H_m = 8 | "
        f"{yes(record['conditions']['claimed'])}, for tokens of 8 numbers and four lags of equal weight | "
        f"{'holds there only' if record['conditions']['claimed'] else 'fails'} |",
    ]
    for scores, d in kinds(record):
        means = {h: statistics.mean(v) for h, v in trained_errors(record, scores, d).items()}
        best = min(means, key=lambda h: means[h])
        size = record["setting"]["budget"] // best
        near = within_spread(trained_errors(record, scores, d), best)
        others = f"; within one standard deviation of it: {', '.join(map(str, near))}" if near else ""
        verdict = (
            "not seen here" if size != d else "lowest there, but not distinguishable from others" if near else "holds"
        )
        lines.append(
            f"| heads as large as a token are best ({said((scores, d))}) | best: {best} heads in total, of size {size} "
            f"({short(means[best])}){others} | {verdict} |"
        )
    return [*lines, "", *sentences(record)]


def within_spread(errors: dict[int, list[float]], best: int) -> list[int]:
    """Other numbers of heads whose mean is within one spread (the larger of the two) of the best mean."""
    mean, spread_ = statistics.mean, lambda v: statistics.stdev(v) if len(v) > 1 else 0.0
    return [
        h
        for h, v in errors.items()
        if h != best and mean(v) - mean(errors[best]) <= max(spread_(v), spread_(errors[best]))
    ]


def u_shaped(errors: dict[int, float]) -> bool:
    values = [errors[h] for h in sorted(errors)]
    return values[:8] == sorted(values[:8], reverse=True) and values[7:] == sorted(values[7:])


def sentences(record: dict[str, Any]) -> list[str]:
    """Which reading the data support."""
    reads = readings(record)
    if len(reads) < len(READINGS) * len(kinds(record)):
        return ["Not all numbers of heads were run: nothing is said about the two readings."]
    eight = {
        name: [said(kind) for (kind, other), read in reads.items() if other == name and read.best == 8]
        for name in READINGS
    }
    told = "; ".join(f"heads {n}, {heads_of(n, 8)}: {' and '.join(k) or 'none of ours'}" for n, k in eight.items())
    return [
        "**Heads in total or per lag?** The published set-up is not known in detail (size of tokens, positions, "
        "steps), so only properties that do not depend on it are compared. Our best number is 8 on the axis in these "
        f"cases: {told}. With fewer heads than lags a layer cannot attend to all lags, so the error rises steeply "
        "below four heads in total. Only one reading has this rise on the published axis, where one head is 19 times "
        "worse than eight.",
        "",
        *concluded(reads),
    ]


def heads_of(reading: str, on_axis: int) -> str:
    total = READINGS[reading] * on_axis
    return f"{total} heads of {256 // total}"


def concluded(reads: dict[tuple[tuple[str, int], str], Read]) -> list[str]:
    """Three properties of the published errors, and how many of our kinds of layer have each, by reading."""
    tests: dict[str, Callable[[Read], bool]] = {
        "one head at least ten times worse than the best number": lambda r: r.ends[0] >= 10,
        "best at 8 on the axis": lambda r: r.best == 8,
        "a rank correlation above 0.8": lambda r: r.correlation > 0.8,
    }
    scores = dict.fromkeys(READINGS, 0)
    lines = [
        "| property of the published errors | " + " | ".join(f"heads {n}" for n in READINGS) + " |",
        "| --- | --- | --- |",
    ]
    for words, test in tests.items():
        counts = {name: [test(r) for (_, other), r in reads.items() if other == name] for name in READINGS}
        lines.append(f"| {words} | {' | '.join(f'{sum(c)} of {len(c)}' for c in counts.values())} |")
        for name, passed in counts.items():
            scores[name] += sum(passed)
    better = max(scores, key=lambda name: scores[name])
    tie = len(set(scores.values())) == 1
    verdict = "The trained layers do not decide" if tie else f"The trained layers agree better with *heads {better}*"
    return [*lines, "", f"{verdict}: {', '.join(f'{n} for heads {name}' for name, n in scores.items())}."]


def said(kind: tuple[str, int]) -> str:
    return f"{kind[0]}, d = {kind[1]}"


def figure(record: dict[str, Any], file: Path) -> None:
    """The curve, and the errors of trained layers under both readings."""
    picture, axes = pyplot().subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    bounds = {int(h): e for h, e in record["curve"].items()}
    axes[0].plot(list(bounds), list(bounds.values()), color="black", linewidth=1, label="here")
    axes[0].scatter(list(CURVE), list(CURVE.values()), color="C3", zorder=3, s=18, label="published")
    axes[0].set_title("the bound, D = 128, d = 16, one lag", fontsize=9)
    for panel, reading in zip(axes[1:], READINGS, strict=True):
        panel.plot(list(TRAINED), list(TRAINED.values()), "o--", color="C3", markersize=4, label="published")
        for place, kind in enumerate(kinds(record)):
            errors_ = trained_errors(record, *kind)
            for seed in range(record["setting"]["seeds"]):
                shown = [(h, errors_[READINGS[reading] * h][seed]) for h in TRAINED if READINGS[reading] * h in errors_]
                label = f"{kind[0]}, d = {kind[1]}" if seed == 0 else None
                panel.plot(*zip(*shown, strict=True), color=f"C{(0, 1, 2, 4)[place]}", linewidth=0.9, label=label)
        panel.set_yscale("log")
        panel.set_title(f"4-gram, D = 256: published axis as heads {reading}", fontsize=9)
        panel.set_ylabel("validation error")
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("heads")
        panel.legend(fontsize=7)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
