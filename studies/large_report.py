"""The page of the studies at 38 M parameters: every comparison with its error, its conditions and what it decides.

python studies/large_report.py studies/large.jsonl --markdown docs/at-scale.md
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from large_plan import BATCH, EVERY, LAW, LONG, PARTS, SEEDS, STEPS, VARIANTS, Part, StudyPlan, Variant, rate_at
from large_record import read_record, runs_of
from large_shapes import SIZES
from paired import MATTERS, Difference, difference, words

from deadweight.report.figure import pyplot, save
from deadweight.report.record import PageOption, show_page

STUDIES = {
    "S2": "Query, key and value weights",
    "S3": "Number and size of heads",
    "S1": "Biases",
    "gauge": "Training without the gauge",
}


UPKEEP = (
    f"*Upkeep* changes the weights every {EVERY} steps without changing the function (`train/gauge.py`). *Balance*: "
    "queries and keys of each head get equal Gram matrices, and so do values and output. *Dead directions*: what every "
    "LayerNorm hides is set to zero. The moments of AdamW stay as they are."
)


@dataclass(frozen=True)
class Comparison:
    """A variant against its base, over pairs of one seed. `rounded`: the difference of the losses with weights of so
    many bits, where both were measured."""

    part: Part
    variant: str
    gap: Difference | None
    rounded: dict[str, Difference]
    rates: tuple[float | None, float | None]

    @property
    def verdict(self) -> str:
        return words(self.gap)


class Results:
    """The record, with its questions as methods."""

    def __init__(self, record: list[dict[str, Any]]) -> None:
        self.settings = [line for line in record if line["kind"] == "setting"]
        self.runs = runs_of(record)
        self.plan = StudyPlan(self.runs)

    def bits(self, variant: Variant) -> dict[int, float]:
        """Bits per byte by seed, at the variant's learning rate; the mean where a seed was run twice."""
        rate = self.plan.rate(variant)
        if rate is None:
            return {}
        each = {seed: self.plan.losses(variant, variant.member(seed, rate)) for seed in SEEDS}
        return {seed: statistics.mean(losses) / math.log(2) for seed, losses in each.items() if losses}

    def rounded_bits(self, variant: Variant, bits: str) -> dict[int, float]:
        rate = self.plan.rate(variant)
        if rate is None:
            return {}
        found = {}
        for seed in SEEDS:
            losses = [
                run["rounded"][bits]
                for run in self.plan.of(variant, variant.member(seed, rate))
                if bits in run["rounded"]
            ]
            if losses:
                found[seed] = statistics.mean(losses) / math.log(2)
        return found

    def compare(self, part: Part, name: str) -> Comparison:
        one, base = VARIANTS[name], VARIANTS[part.base]
        rounded = {}
        for bits in ("4", "3"):
            gap = difference(self.rounded_bits(one, bits), self.rounded_bits(base, bits))
            if gap is not None:
                rounded[bits] = gap
        gap = difference(self.bits(one), self.bits(base))
        return Comparison(part, name, gap, rounded, (self.plan.rate(one), self.plan.rate(base)))

    def comparisons(self, study: str) -> Iterator[Comparison]:
        for part in PARTS:
            if part.study == study:
                yield from (self.compare(part, name) for name in part.variants)

    def reruns(self) -> list[float]:
        """Differences in bits per byte between two runs with the same settings."""
        pairs = []
        for runs in self.plan.by_settings.values():
            if len(runs) > 1 and all(run["valid_loss"] is not None for run in runs[:2]):
                pairs.append((runs[1]["valid_loss"] - runs[0]["valid_loss"]) / math.log(2))
        return pairs


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "| --- " * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def page(results: Results) -> str:
    lines = introduction(results)
    for study, title in STUDIES.items():
        said = [UPKEEP, ""] if study == "gauge" else []
        lines += [f"## {title}", "", *said, *comparison_table(results, study)]
    lines += [*sweep_table(results), *noise(results), *speed(results)]
    return "\n".join(lines).rstrip("\n") + "\n"


def introduction(results: Results) -> list[str]:
    s, done = results.settings[-1], sum(c.gap is not None for study in STUDIES for c in results.comparisons(study))
    every = sum(len(part.variants) for part in PARTS if part.study in STUDIES)
    return [
        "# The published claims at 38 M parameters",
        "",
        "This page compares shapes and settings that the smaller studies could not tell apart. `studies/large.py` "
        "trains them in the order in which they decide the most; `studies/large.py --list` says what is left. "
        f"**{done} of {every} comparisons are done.** A comparison without three pairs of seeds is not judged.",
        "",
        f"{SIZES['n_layers']} layers of width {SIZES['d_model']}, context {SIZES['context']}, {STEPS:,} steps of "
        f"{BATCH * SIZES['context']:,} bytes, 67 M in all ({LONG:,} steps where 157 M bytes is said), of {s['text']} "
        "(the first 90 M bytes; judged on the next 5 "
        "M), AdamW, clip 1, weight decay 0.1, warm-up over a tenth of the steps, then a cosine to a tenth; LayerNorm "
        f"before each block, learned positions and no biases unless said; bfloat16, {s['machine']}, torch "
        f"{s['torch']}.",
        "",
        "Differences are bits per byte of held-out text, variant minus base: positive is worse. They are means over "
        f"{len(SEEDS)} seeds that are paired (equal initial weights where both have them, equal text in equal order), "
        "± standard error. A 95 % interval is ± 4.3 standard errors. *No difference that matters*: the whole interval "
        f"is within ± {MATTERS}. *Better*, *worse*: the whole interval is on one side of zero. Learning rates of the "
        "shapes in the last table were swept at 67 M bytes, on one seed; other variants take the rate of their base, "
        f"and runs of 157 M bytes the best of their shape × (ratio of steps)^{LAW:g} (arXiv 2409.19913). "
        "Columns of bits: the difference after rounding all linear layers to so many bits, one scale per row, on the "
        "first million bytes of held-out text.",
        "",
    ]


def comparison_table(results: Results, study: str) -> list[str]:
    """The comparisons that were run, and the names of those that were not."""
    rows, left = [], []
    for c in results.comparisons(study):
        if c.gap is None:
            left.append(c.variant)
            continue
        cells = ["–" if gap is None else str(gap) for gap in (c.gap, c.rounded.get("4"), c.rounded.get("3"))]
        rows.append([c.part.question, c.variant, c.part.base, f"{c.rates[0]:g}", *cells, c.verdict])
    head = ["question", "variant", "base", "rate", "difference", "4 bits", "3 bits", "decides"]
    missing = [f"Not judged yet: {'; '.join(left)}.", ""] if left else []
    return [*(table(head, rows) if rows else []), *missing]


def sweep_table(results: Results) -> list[str]:
    swept = {n: results.plan.sweep(n) for n, v in VARIANTS.items() if v.rate_of == n}
    swept = {n: losses for n, losses in swept.items() if len(losses) > 1}
    if not swept:
        return []
    octaves = sorted({octave for losses in swept.values() for octave in losses})
    rows = []
    for name, losses in swept.items():
        cells = [f"{losses[o] / math.log(2):.4f}" if o in losses else "–" for o in octaves]
        rows.append(
            [name, f"{rate_at(name, 0):g}", *cells, "yes" if results.plan.best_octave(name) is not None else "no"]
        )
    head = ["shape", "rate × 1", *(f"× {2.0**octave:g}" for octave in octaves), "finished"]
    return ["## Learning rates", "", "Bits per byte of the first seed.", "", *table(head, rows)]


def noise(results: Results) -> list[str]:
    pairs = results.reruns()
    if not pairs:
        return []
    largest = max(map(abs, pairs))
    return [
        "## How much reruns differ",
        "",
        f"Runs were repeated with the same seed, text and settings, by later code: {len(pairs)}. Differences in bits "
        f"per byte: {', '.join(f'{d:+.4f}' for d in pairs)}; {largest:.4f} at most. The order of sums on a GPU is not "
        "fixed.",
        "",
    ]


def speed(results: Results) -> list[str]:
    together = [r for r in results.runs if r.get("side_by_side")]
    if not together:
        return []
    rates = {n: [r["tokens_per_second"] * n for r in together if r["side_by_side"] == n] for n in (1, 2, 3)}
    told = ", ".join(f"{n} at a time {statistics.median(x):,.0f} bytes/s" for n, x in rates.items() if x)
    alone = [r["tokens_per_second"] for r in results.runs if r.get("first_series")]
    before = (
        f" Before, two or three processes shared the GPU: {statistics.median(alone):,.0f} bytes/s each."
        if alone
        else ""
    )
    steps = "Steps are CUDA graphs" if all(r.get("graphs") for r in together) else "Runs share the GPU"
    return ["## Speed", "", f"{steps} on streams of one process: {told}, together.{before}", ""]


def figure(results: Results, file: Path) -> None:
    """Every comparison that was run, with its 95 % interval."""
    known = [c for study in STUDIES for c in results.comparisons(study) if c.gap is not None]
    picture, axes = pyplot().subplots(figsize=(7.5, 1.2 + 0.32 * max(1, len(known))), layout="constrained")
    for place, c in enumerate(known):
        assert c.gap is not None
        colour = f"C{list(STUDIES).index(c.part.study)}"
        axes.errorbar([c.gap.mean], [place], xerr=[c.gap.margin], fmt="o", color=colour, markersize=4)
    axes.axvspan(-MATTERS, MATTERS, color="grey", alpha=0.15)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(known)), [f"{c.variant}, against {c.part.base}" for c in known], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte, variant minus base, with 95 % intervals; grey: too small to matter")
    save(picture, file)


def whole_page(results: Results) -> str:
    """The page, with its figure if there is anything to draw."""
    known = any(c.gap for study in STUDIES for c in results.comparisons(study))
    return page(results) + ("\n![every comparison with its interval](at-scale.svg)\n" if known else "")


def main(
    file: Annotated[Path, typer.Argument(metavar="RECORD", help="The record (JSON lines).")],
    markdown: PageOption = None,
) -> None:
    """Make the page and the figure of the record."""
    results = Results(read_record(file))
    text = whole_page(results)
    if markdown is not None and "at-scale.svg" in text:
        figure(results, markdown.with_suffix(".svg"))
    show_page(text, markdown)


if __name__ == "__main__":
    typer.run(main)
