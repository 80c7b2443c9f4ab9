"""Can a trained head of 64 dimensions be replaced by one of 4, started by truncated SVD and fine-tuned?

Published (arXiv 2510.03784): yes, one head at a time. Here on the model that comes with deadweight, on Python's manual,
and then for all heads at once:

1. one head at a time, 64 → 4: plain SVD of the weights (W_Qᵀ W_K and W_O W_V), and the calibrated form, which weighs
   what the head really passes on and what the loss notices of it; before and after fine-tuning (distillation);
2. the whole model, every head 64 → 48 … 4, by plain SVD, by calibrated SVD, and with the same number of weights spread
   over heads and layers by a knapsack; before and after fine-tuning.

    python studies/s4_heads.py run --out studies/s4_heads.json
    python studies/s4_heads.py report studies/s4_heads.json --markdown docs/small-heads.md
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from deadweight.compress.calibration import Calibration, CalibrationRequest, head_calibration, text_to_heal_on
from deadweight.compress.head_moments import HeadMoments, HeadRecorder
from deadweight.compress.head_spaces import find_head_spaces
from deadweight.compress.heal import Healing, distil
from deadweight.compress.judge import judge
from deadweight.compress.linear_map import LinearMap
from deadweight.compress.locate import locate
from deadweight.compress.measure import measure
from deadweight.compress.slim_form import assemble_slim
from deadweight.compress.subspace import best_subspace
from deadweight.compress.truncate import HeadSpaces, KeptDimensions, kept_whole, truncate_model
from deadweight.compress.weight_budget import attention_weights, choose_ranks, priced_spaces
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, save_record
from deadweight.source.model import Source, open_complete

app = typer.Typer(add_completion=False, help=__doc__)
SMALL = 4
SIZES = (48, 32, 16, 8, 4)
PLAIN, CALIBRATED, SPREAD = "plain SVD", "calibrated SVD", "knapsack"
MERGED = "It was recorded with an earlier version, in which the heads of a layer shared one subspace of values."
Data = dict[str, Any]


def plain(model: torch.nn.Module, spaces: HeadSpaces) -> HeadSpaces:
    """The truncated SVD of the weights alone, as if inputs were white noise and all outputs mattered equally."""
    heads = spaces.heads
    assert heads.query is not None and heads.key is not None and heads.value is not None and heads.output is not None
    values, out = LinearMap(model, heads.value.module).weight, LinearMap(model, heads.output).weight
    queries, keys = LinearMap(model, heads.query.module).weight, LinearMap(model, heads.key.module).weight
    columns = out.unflatten(1, (heads.heads, heads.d_v)).transpose(0, 1)  # h out d

    def rows(weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = weight[places]
        return (rows @ rows.T)[None]

    return replace(
        spaces,
        mean=torch.zeros_like(spaces.mean),
        values=tuple(
            best_subspace(rows(values, heads.value.places[h]), (columns[h].T @ columns[h])[None])
            for h in range(heads.heads)
        ),
        non_rotary=tuple(
            best_subspace(rows(keys, heads.key.places[h]), rows(queries, heads.query.places[h]))
            for h in range(heads.heads)
        ),
    )


def with_sizes(spaces: Sequence[HeadSpaces], sizes: dict[tuple[str, int], int]) -> dict[str, KeptDimensions]:
    """Every attention as it is, except the named heads, which keep so many dimensions of keys and of values."""
    kept_by_path = {}
    for s in spaces:
        kept = tuple(sizes.get((s.heads.path, h), s.heads.d_v) for h in range(s.heads.heads))
        kept_by_path[s.heads.path] = replace(kept_whole(s.heads), values=kept, non_rotary=kept)
    return kept_by_path


class Trial:
    """The model, its text, and the cost of a truncation before and after fine-tuning."""

    def __init__(self, windows: int, length: int, steps: int, seeds: int) -> None:
        self.source: Source = open_complete("demo")
        request = CalibrationRequest("embedded", windows=windows, length=length)
        self.calibration: Calibration = head_calibration(self.source, "demo", request)
        self.steps, self.seeds = steps, seeds
        self.text = text_to_heal_on(self.source, "demo", "embedded", None, self.calibration, steps)

    def measured(self) -> list[HeadSpaces]:
        attentions, model = locate(self.source), self.source.module
        moments = measure(
            model, HeadRecorder, {h.path: HeadMoments.empty(h) for h in attentions}, self.calibration.measure
        )
        return [find_head_spaces(h, moments[h.path].mean(), model) for h in attentions]

    def outcome(self, spaces: Sequence[HeadSpaces], kept: dict[str, KeptDimensions], *, heal: bool) -> Data:
        """KL and loss on held-out text; with `heal`, also after fine-tuning, for every seed."""

        def fresh() -> torch.nn.Module:
            return assemble_slim(truncate_model(self.source.module, spaces, kept, bias=True))[0]

        first = judge(self.source.module, fresh(), self.calibration.judge)
        told: Data = {"kl": first.error, "loss": first.increase, "healed": []}
        for seed in range(self.seeds if heal else 0):
            module = fresh()
            distil(self.source.module, module, self.text, Healing(self.steps, seed=seed))
            after = judge(self.source.module, module, self.calibration.judge)
            told["healed"].append({"kl": after.error, "loss": after.increase})
        return told


@app.command()
def run(
    out: OutOption,
    windows: Annotated[int, typer.Option(help="Text windows; an eighth of them is held out for evaluation.")] = 64,
    length: Annotated[int, typer.Option(help="Bytes per window.")] = 128,
    steps: Annotated[int, typer.Option(help="Fine-tuning steps.")] = 40,
    seeds: Annotated[int, typer.Option(help="Seeds of the order of the batches.")] = 3,
) -> None:
    """Truncate each head alone, then all together, and write the record."""
    torch.manual_seed(0)
    trial = Trial(windows, length, steps, seeds)
    own = trial.measured()
    attentions = [s.heads for s in own]
    methods = {PLAIN: [plain(trial.source.module, s) for s in own], CALIBRATED: own}
    setting = {"windows": windows, "length": length, "steps": steps, "seeds": seeds, **circumstances()}
    record: Data = {"setting": setting, "single": [], "whole": []}
    for s in own:
        for h in range(s.heads.heads):
            row: Data = {"attention": s.heads.path, "head": h}
            for method, spaces in methods.items():
                kept = with_sizes(spaces, {(s.heads.path, h): SMALL})
                row[method] = trial.outcome(spaces, kept, heal=h == 0)
            record["single"].append(row)
            typer.echo(f"{s.heads.path} head {h}: {row[PLAIN]['kl']:.2e} → {row[CALIBRATED]['kl']:.2e}")
    for size in SIZES:
        every = {(s.heads.path, h): size for s in own for h in range(s.heads.heads)}
        row = {"size": size}
        for method, spaces in methods.items():
            row[method] = trial.outcome(spaces, with_sizes(spaces, every), heal=True)
        slots = [slot for s in own for slot in priced_spaces(s, trial.source.module, 2)]
        total = attention_weights(attentions, trial.source.module)
        ranks = choose_ranks(slots, attentions, size / attentions[0].d_v, total, "knapsack")
        row[SPREAD] = trial.outcome(own, ranks.kept, heal=True)
        record["whole"].append(row)
        typer.echo(f"all heads {size}: " + ", ".join(f"{m} {row[m]['kl']:.2e}" for m in (PLAIN, CALIBRATED, SPREAD)))
        save_record(out, record)


def spread(told: Data, key: str = "kl") -> str:
    """Mean ± standard deviation after fine-tuning."""
    values = [t[key] for t in told["healed"]]
    if not values:
        return ""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def methods_of(record: Data) -> list[str]:
    """The methods by which all heads were truncated, as they were called when they were recorded."""
    return [name for name in record["whole"][0] if name != "size"]


def written(record: Data) -> str:
    """The page of a record."""
    setting = record["setting"]
    lines = [
        "# Heads of 4 dimensions",
        "",
        "This page tests a published claim ([arXiv 2510.03784](https://arxiv.org/abs/2510.03784)): a trained head "
        "can be",
        "replaced by one of much lower dimension, initialised by truncated SVD and fine-tuned.",
        "",
        f"**Verdict.** {verdict(record)}",
        "",
        "The model is the one that comes with deadweight (4 layers, 3 heads of 64), the text Python's manual:",
        f"{setting['windows']} windows of {setting['length']} bytes, an eighth of them held out for judging. "
        "Fine-tuning",
        f"is distillation for {setting['steps']} steps, with {setting['seeds']} orders of the text. The numbers are KL",
        "divergences from the original in nats per byte, on the held-out windows.",
        "",
        f"`python studies/s4_heads.py run --out studies/s4_heads.json --windows {setting['windows']} --length "
        f"{setting['length']} --steps {setting['steps']} --seeds {setting['seeds']}`",
        "",
        "## One head at a time, 64 → 4, queries and keys as well as values",
        "",
        f"| head | {PLAIN} | fine-tuned | {CALIBRATED} | fine-tuned |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in record["single"]:
        cells = [f"{row[m]['kl']:.4f} | {spread(row[m])}" for m in (PLAIN, CALIBRATED)]
        lines.append(f"| {row['attention']}, {row['head']} | {' | '.join(cells)} |")
    better = sum(row[CALIBRATED]["kl"] < row[PLAIN]["kl"] for row in record["single"])
    means = [statistics.mean(row[m]["kl"] for row in record["single"]) for m in (PLAIN, CALIBRATED)]
    lines += [
        "",
        f"Calibrated SVD loses less than plain SVD in {better} of {len(record['single'])} heads; on average "
        f"{means[0]:.4f} and {means[1]:.4f}.",
        "",
        "## All heads at once",
        "",
        f"| dimensions | {' | '.join(f'{m} | fine-tuned' for m in methods_of(record))} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["whole"]:
        cells = [f"{row[m]['kl']:.4f} | {spread(row[m])}" for m in methods_of(record)]
        lines.append(f"| {row['size']} | {' | '.join(cells)} |")
    lines += [
        "",
        "The last method caches as many numbers as the others and lets the knapsack choose the size of each head "
        "and layer.",
        *([] if SPREAD in methods_of(record) else [MERGED]),
        "",
        "![KL divergence against the size of heads](small-heads.svg)",
        "",
        f"Recorded with torch {setting['torch']}, transformers {setting['transformers']}, on {setting['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def verdict(record: Data) -> str:
    """How often fine-tuning helped and hurt."""
    rows = (*record["single"], *record["whole"])
    tried = [row[m] for row in rows for m in methods_of(record) if m in row]
    tried = [t for t in tried if t["healed"]]
    after = [statistics.mean(h["kl"] for h in t["healed"]) for t in tried]
    worse = [t["kl"] for t, a in zip(tried, after, strict=True) if a > t["kl"]]
    better = [t["kl"] for t, a in zip(tried, after, strict=True) if a <= t["kl"]]
    return (
        f"A head of 4 dimensions is not free here, fine-tuned or not. Fine-tuning for {record['setting']['steps']} "
        f"steps helped in {len(better)} of {len(tried)} cases and hurt in {len(worse)}. It hurt where little had been "
        f"lost (at most {max(worse, default=0):.3f} before) and helped where more had been lost "
        f"({min(better, default=0):.3f} or more): such short training also moves weights that were right."
    )


def drawn(record: Data, file: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for color, method in zip(("tab:gray", "tab:blue", "tab:red"), methods_of(record), strict=True):
        sizes = [row["size"] for row in record["whole"]]
        axes.plot(sizes, [row[method]["kl"] for row in record["whole"]], "o--", color=color, label=method)
        after = [[t["kl"] for t in row[method]["healed"]] for row in record["whole"]]
        axes.plot(sizes, [statistics.mean(a) for a in after], "s-", color=color, label=f"{method}, fine-tuned")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("dimensions of every head (of 64)")
    axes.set_ylabel("KL from the original, nats per byte")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, file)


add_report(app, written, drawn)

if __name__ == "__main__":
    app()
