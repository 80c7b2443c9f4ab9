"""The page for people who design models: one table, keep or drop, made from the records of all studies.

python studies/choices.py --markdown docs/choices.md

Advice on what training decides follows from the interval of the difference, so it changes with the records. Nothing is
called better or worse on fewer than three seeds. What a proof decides needs no seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import s1_bias
import s1_encoders
import s2_query_weights
import s3_plans
import typer
from large_plan import PARTS
from large_record import read_record
from large_report import Comparison, Results
from large_shapes import KINDS
from paired import Difference, words
from s2_claims import millions

from deadweight.report.record import PageOption, load_record, show_page

FOLDER = Path(__file__).parent
PROOF = "by proof"


@dataclass(frozen=True)
class Row:
    """One choice: what it is about, the advice, the size of the effect, the conditions, and the page behind it."""

    choice: str
    advice: str
    effect: str
    conditions: str
    page: str

    def __str__(self) -> str:
        link = f"[{self.page}]({self.page}.md)"
        return f"| {self.choice} | **{self.advice}** | {self.effect} | {self.conditions} | {link} |"


class Records:
    """The records of all studies."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.biases = load_record(folder / "s1_bias.json")
        self.drift = load_record(folder / "s1_key_drift.json")
        self.encoders = load_record(folder / "s1_encoders.json")
        self.small = load_record(folder / "s2_query_weights.json")
        self.first = s2_query_weights.read_large(folder / "s2_large.jsonl", folder / "s2_large_pilot.jsonl")
        self.plans = load_record(folder / "s3_plans.json")
        self.large = Results(read_record(folder / "large.jsonl"))

    def at_scale(self, variant: str) -> Comparison | None:
        """The comparison of a variant at 38 M parameters, if it is judged."""
        for part in PARTS:
            if variant in part.variants and part.study != "noise":
                found = self.large.compare(part, variant)
                return found if found.gap is not None else None
        return None


ADVICE = {  # by what the variant does to its base: for a better, an equal and a worse result
    "leaves out": ("Drop it", "Drop it", "Keep it"),
    "adds": ("Keep them", "Drop them", "Drop them"),
    "does instead": ("Do it", "A free choice", "Do not"),
}


def advice_of(gap: Difference, kind: str = "leaves out") -> str:
    """Advice from the difference that a variant makes."""
    better, equal, worse = ADVICE[kind]
    if gap.is_small:
        return equal
    return better if gap.is_better else worse if gap.is_worse else "Undecided"


PROVED = (
    Row(
        "value bias", "Drop it", "none: it folds into the output bias", f"{PROOF}; if there is an output bias", "biases"
    ),
    Row(
        "output bias and second MLP bias",
        "Drop one in parallel blocks",
        "none: only their sum matters",
        f"{PROOF} (GPT-NeoX, Phi)",
        "biases",
    ),
    Row("shift of a pre-norm", "Drop it", "none: it folds", f"{PROOF}; if its readers have biases", "biases"),
    Row("a bias before BatchNorm", "Drop it", "none: 12 of 12 directions are dead in training", PROOF, "biases"),
)


def biases(records: Records) -> Iterator[Row]:
    yield from key_bias(records)
    zeroed = {n: z["after"] - z["before"] for n, z in records.biases["zeroed in the embedded model"].items()}
    yield Row(
        "query bias",
        "Keep it, if you keep one of Q, K, V",
        f"zeroing it costs {zeroed['b_Q']:+.1e} bits per byte, the value bias {zeroed['b_V']:+.1e}",
        "pre-norm, the embedded model; in post-norm blocks it folds",
        "biases",
    )
    yield from PROVED
    yield from encoder_rows(records)
    for variant, name in (("all biases", "all biases"), *((f"all biases but {k}", f"bias {k}") for k in KINDS)):
        if (found := records.at_scale(variant)) is not None:
            yield scale_row(name, found, "adds" if variant == "all biases" else "leaves out")


def key_bias(records: Records) -> Iterator[Row]:
    record, cost = records.biases, records.drift["embedded"]["bits"]
    off = max(map(abs, s1_bias.difference(record, "without b_K")))
    noise = s1_bias.spread(s1_bias.losses(record, "all biases"))
    ratio = record["training"]["rotary, all biases"]["key_over_query_gradient"]
    less = {n: cost[n]["zeroed"] - cost[n]["as trained"] for n in ("bfloat16", "keys in 8 bits", "keys in 4 bits")}
    yield Row(
        "key bias",
        "Drop it",
        f"losses differ by {off:.1e} at most, seeds by {noise:.1e}",
        f"{PROOF}; without rotary positions (GPT-2, OPT, BERT, ViT, BLOOM)",
        "biases",
    )
    yield Row(
        "key bias of a trained model",
        "Zero it before you round keys",
        f"{less['bfloat16']:+.4f} bits per byte in bfloat16, {less['keys in 8 bits']:+.4f} with keys of 8 bits, "
        f"{less['keys in 4 bits']:+.4f} with 4",
        "the embedded model; Adam lets such biases grow",
        "key-drift",
    )
    yield Row(
        "key bias, rotary positions",
        "A free choice",
        f"its gradient is up to {ratio:.2g} of that of the query bias",
        "live; in partly rotated heads the non-rotary part is dead (GPT-NeoX 75%)",
        "biases",
    )


def scale_row(name: str, found: Comparison, kind: str = "leaves out") -> Row:
    """A comparison at 38 M parameters."""
    assert found.gap is not None
    return Row(
        name,
        advice_of(found.gap, kind),
        f"{found.gap}: {words(found.gap)}",
        f"{found.variant} against {found.part.base}, 38 M parameters, 67 M bytes",
        "at-scale",
    )


def encoder_rows(records: Records) -> Iterator[Row]:
    for task in records.encoders["runs"]:
        gap = s1_encoders.against_all(records.encoders, task, "without b_Q and b_2")
        advice = "Keep them" if gap.is_worse else "No harm seen"
        yield Row(
            f"b_Q and b_2 of a post-norm encoder, {task}",
            advice,
            f"{gap} nats: {s1_encoders.decides(gap)}",
            f"they fold into the norm's shift by proof; trained from scratch, {gap.seeds} seeds",
            "encoders",
        )


def projections(records: Records) -> Iterator[Row]:
    names = {"identity Q": "query projection", "identity K": "key projection", "identity V": "value projection"}
    for variant, name in names.items():
        if (found := records.at_scale(variant)) is not None:
            yield scale_row(name, found)
        elif (longest := records.first.longest_gap(variant)) is not None:
            steps, gap = longest
            yield Row(
                name,
                advice_of(gap),
                f"{gap}: {words(gap)}",
                f"38 M parameters, {millions(steps)}, rates swept on shorter runs",
                "query-weights",
            )
    for variant in ("identity Q, larger MLP", "identity V, larger MLP", "identity Q and V", "full, smaller MLP"):
        if (found := records.at_scale(variant)) is not None:
            yield scale_row(variant, found, "does instead")
    half = records.first.half_scale("identity Q")
    if half is not None:
        yield Row(
            "half the attention scale with identity queries",
            advice_of(half, "does instead"),
            f"{half}: {words(half)}",
            f"38 M parameters, {millions(1216)}",
            "query-weights",
        )
    yield Row(
        "a whole projection of a trained model",
        "Keep it",
        "exact only without norms and with the right skips",
        f"{PROOF}; holds in the three published cases, fails elsewhere",
        "exact-projections",
    )


def heads(records: Records) -> Iterator[Row]:
    plans = records.plans
    for name, said in {
        "equal heads, 8 × 32": "heads of 32 instead of 64",
        "equal heads, 16 × 16": "heads of 16 instead of 64",
        "large heads early": "large heads early, small ones late",
        s3_plans.SATURATED: "heads planned by the error bound and saturation",
    }.items():
        mean, error = s3_plans.against(plans, name, s3_plans.EQUAL)
        gap = Difference(mean, error, plans["setting"]["seeds"])
        yield Row(
            said,
            advice_of(gap, "does instead"),
            f"{gap}: {words(gap)}",
            "six layers of width 256, equal weights",
            "plans",
        )
    for variant in ("16 × 32", "4 × 128", "2 × 256", "32 × 16", "the bound", "large heads early"):
        if (found := records.at_scale(variant)) is not None:
            yield scale_row(f"heads: {variant} instead of 8 × 64", found, "does instead")
    yield Row(
        "trained heads cut to 4 dimensions", "Do not", "0.9632 nats per byte for all heads", "fine-tuned", "small-heads"
    )
    yield Row(
        "a cache of 16 bits",
        "Drop three quarters of it",
        "+0.23 % perplexity; an eighth of the bytes +3.40 %",
        "SmolLM2-135M, WikiText-2",
        "cache",
    )
    yield Row(
        "smaller late layers because softmax saturates",
        "Do not",
        "0 of 270 heads saturate",
        "SmolLM2-135M",
        "saturation",
    )


def others(records: Records) -> Iterator[Row]:
    for variant in ("upkeep: both", "upkeep: balance", "upkeep: dead directions", "4 × the rate, upkeep: both"):
        if (found := records.at_scale(variant)) is not None:
            assert found.gap is not None
            rounded = "".join(f"; with {b} bits {gap}" for b, gap in found.rounded.items())
            yield Row(
                f"exact changes of basis while training ({variant})",
                advice_of(found.gap, "adds").replace(" them", " it"),
                f"{found.gap}: {words(found.gap)}{rounded}",
                "38 M parameters, 67 M bytes, every 100 steps",
                "at-scale",
            )
    yield Row(
        "LayerNorm instead of RMSNorm",
        "RMSNorm wastes less",
        "345 redundant dimensions of 1208 in a small GPT-2, 173 of 1304 in a small LLaMA",
        f"{PROOF}; which trains better was not studied",
        "completeness",
    )
    yield Row("the skip around an MLP", "Keep it", "the MLP needs d more hidden units instead", PROOF, "skip-boundary")


INTRODUCTION = """\
# Keep or drop: what the studies mean for somebody who designs a model

This page says, choice by choice, what to keep and what to drop in a new model. `studies/choices.py` makes the table
from the records of the studies. Effects are bits per byte of held-out text unless said: positive means that leaving the
thing out, or doing what the row says, is worse. Errors are standard errors over pairs of one seed, with three seeds or
more; *no difference that matters* means that the whole 95 % interval is within ± 0.005, *better* and *worse* that it is
on one side of zero, *not decided* that more seeds or longer runs are needed. What holds by proof needs no seeds and
does not depend on size. Rows that show no useful effect are results too, and are listed with the others.

| choice | advice | effect | conditions | study |
| --- | --- | --- | --- | --- |
"""
LIMITS = """
## What this table does not say

Models of 4.7 M and 38 M parameters and one kind of text do not settle what holds at a hundred times the size. Proofs do
not depend on size. No study here measures fine-tuning, other modalities but small images, or training with many data
sets. [at-scale](at-scale.md) says which comparisons have not been run.
"""


def page(records: Records) -> str:
    rows = [*biases(records), *projections(records), *heads(records), *others(records)]
    return INTRODUCTION + "\n".join(map(str, rows)) + "\n" + LIMITS


def main(markdown: PageOption = None) -> None:
    """Make the page."""
    show_page(page(Records()), markdown)


if __name__ == "__main__":
    typer.run(main)
