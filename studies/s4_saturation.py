"""Does the norm of the softmax Jacobian fall like 1/L, and more so in later layers?

Published (arXiv 2510.03784): the norm of diag(p) − ppᵀ is O(1/L) in the length L, so that larger heads bring less and
less for long sequences, and later layers can do with less. The proof assumes bounded logits. Measured here, with the
exact norm of rows of 4, 8, … keys of every head, on real text:

1. trained models, and the slope of log-norm on log-length for every head, beside the growth of its logit range;
2. the control: the same architectures with random weights, whose logits are small, where the claim must hold;
3. what is left if the first key of a window, on which models park weight, is set aside.

    python studies/s4_saturation.py run MODEL... --text FILE --out studies/s4_saturation.json
    python studies/s4_saturation.py report studies/s4_saturation.json --markdown docs/saturation.md
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from deadweight import embedded
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, save_record
from deadweight.report.saturation import draw_panels, saturation_data
from deadweight.saturation.run import saturation
from deadweight.saturation.slopes import FEWEST, VERDICTS

app = typer.Typer(add_completion=False, help=__doc__)
RANDOM = ", random weights"
LONG = 64  # keys: from here on lengths are long
TRAINED = ("length", "norm", "log_norm", "logit_range", "entropy", "largest")  # by length, in the record
CONTROL = ("length", "norm", "log_norm", "logit_range")
Data = dict[str, Any]


@app.command()
def run(
    models: Annotated[list[str], typer.Argument(help="Folders of causal language models, or demo.")],
    text: Annotated[str, typer.Option(help="The text they read.")],
    out: OutOption,
    windows: Annotated[int, typer.Option(help="Text windows of the longest length.")] = 8,
    length: Annotated[int | None, typer.Option(help="Longest context; default: 1024, or the model's context.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampled rows and of the random weights.")] = 0,
) -> None:
    """Measure every model, and its architecture with random weights, and write the record."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    setting = {"text": Path(text).name, "windows": windows, "length": length, "seed": seed, **circumstances()}
    record: Data = {"setting": setting, "models": []}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            untrained(model, Path(folder), seed)
            for source, added in ((model, ""), (folder, RANDOM)):
                print(Path(model).name + added, flush=True)
                data = measure(source, text, windows=windows, length=length, seed=seed)
                data = thinned(data, CONTROL if added else TRAINED)
                record["models"].append({**data, "model": Path(model).name + added, "text": Path(text).name})
                save_record(out, record, indent=None)


def measure(model: str, text: str, **options: Any) -> Data:
    return saturation_data(saturation(model, text, **options))


def thinned(data: Data, columns: Sequence[str]) -> Data:
    """Keep only these columns, to four digits, so that the record stays small."""
    for layer in data["layers"]:
        for head in layer["heads"]:
            head["by_length"] = {name: [short(v) for v in head["by_length"][name]] for name in columns}
    return data


def short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def untrained(model: str, folder: Path, seed: int) -> None:
    """The same architecture and tokenizer, with initial weights."""
    source = embedded.path() if model == "demo" else Path(model)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(source)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "special")):
            shutil.copy(file, folder / file.name)


def heads_of(data: Data) -> list[Data]:
    return [{**h, "layer": i} for i, layer in enumerate(data["layers"]) for h in layer["heads"]]


def slope_from(head: Data, least: int, name: str = "log_norm") -> float | None:
    """The least-squares slope of the means by length, of lengths from `least` on."""
    by = head["by_length"]
    points = [(math.log(n), y) for n, y in zip(by["length"], by[name], strict=True) if n >= least]
    if len(points) < FEWEST:
        return None
    x, y = zip(*points, strict=True)
    return statistics.linear_regression(x, y).slope


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's rank correlation."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return statistics.correlation(ranks(x), ranks(y))


def ranks(values: list[float]) -> list[float]:
    """Ranks from 0; ties get their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def trained(record: Data) -> list[Data]:
    return [m for m in record["models"] if not m["model"].endswith(RANDOM)]


def written(record: Data) -> str:
    parts = ["# Does the softmax saturate with length?", "", QUESTION, "", "## Verdicts", "", *verdicts(record), ""]
    parts += [intro(record), "", THEORY, "", "## By model", ""]
    parts += [*model_table(record), "", "![norm by length, slopes, logit ranges](saturation.svg)", ""]
    for data in trained(record):
        parts += [f"## {data['model']} by layer", "", *layer_table(data), "", *named_heads(data), ""]
    return "\n".join([*parts, MEANING, ""])


def intro(record: Data) -> str:
    s = record["setting"]
    return (
        f"Written by `studies/s4_saturation.py` from its record: {s['windows']} windows of {s['text']}, torch "
        f"{s['torch']}, transformers {s['transformers']}, {s['machine']}. "
        "The same for any model: `deadweight saturation MODEL --text FILE`."
    )


QUESTION = """\
This page tests a published claim: with more keys the softmax of attention saturates, that is, the norm of its Jacobian
falls like 1/L. Trained models are compared with the same architectures at random weights."""

THEORY = """\
## What is measured

The Jacobian of a softmax row with weights p is J = diag(p) − ppᵀ. Its norm, the largest eigenvalue, is computed exactly
(`saturation/softmax_norm.py` has the proof). With p₁ the largest weight, p₁(1 − p₁) ≤ ‖J‖ ≤ min(p₁, 2p₁(1 − p₁)) ≤ ½.
So the norm is small if no weight is large, and also if one weight is close to 1. Weights spread over L keys give 1/L;
two keys that share all weight give ½ at any L. For logits within a range R, p₁ ≤ e^R/(L − 1 + e^R). The published
O(1/L) follows if R stays bounded. If R grows by 1 or more for each e-fold of L, the bound does not fall at all.

A row belongs to length L if it sees more than ¾L and at most L keys. Slopes are least-squares fits of the mean log-norm
over the mean log-length, ± one standard error from the spread over windows; norms below 2⁻²⁴ are raised to 2⁻²⁴.
*Saturates*: slope ≤ −¾. *Partly*: up to −¼. *Flat*: up to ¼. *Grows*: above."""


def model_table(record: Data) -> list[str]:
    lines = [
        f"*Slope*: of the log-norm over all lengths. *Long*: the same from {LONG} keys on. *Without the first key*: "
        "the slope for the softmax over the other keys. *Growth*: of the logit range per e-fold of length. All are "
        "means over heads.",
        "",
        f"| model | heads | {' | '.join(VERDICTS)} | slope | long | without the first key | growth | "
        "L · norm, longest |",
        "| --- " * (len(VERDICTS) + 7) + "|",
    ]
    for data in record["models"]:
        heads = heads_of(data)
        counts = " | ".join(f"{sum(h['verdict'] == v for h in heads)}" for v in VERDICTS)
        long = [s for h in heads if (s := slope_from(h, LONG)) is not None]
        ends = [h["by_length"]["norm"][-1] * h["by_length"]["length"][-1] for h in heads]
        lines.append(
            f"| {data['model']} | {len(heads)} | {counts} | {mean(heads, 'slope')} | "
            f"{signed(statistics.fmean(long)) if long else ''} | {mean(heads, 'rest_slope')} | "
            f"{mean(heads, 'range_slope')} | {statistics.fmean(ends):.3g} |"
        )
    return lines


def mean(heads: list[Data], name: str) -> str:
    return signed(statistics.fmean(h[name] for h in heads if h[name] is not None))


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def layer_table(data: Data) -> list[str]:
    first, last = data["lengths"][0], data["lengths"][-1]
    lines = [
        f"| layer | norm at {first} | at {last:,} | slope | without the first key | {' | '.join(VERDICTS)} | "
        f"logit range at {first} | at {last:,} | largest weight at {last:,} | factor |",
        "| --- " * (len(VERDICTS) + 9) + "|",
    ]
    for i, layer in enumerate(data["layers"]):
        heads = layer["heads"]
        at = {
            (name, place): statistics.fmean(h["by_length"][name][place] for h in heads)
            for name in ("norm", "logit_range", "largest")
            for place in (0, -1)
        }
        counts = " | ".join(f"{sum(h['verdict'] == v for h in heads) or ''}" for v in VERDICTS)
        lines.append(
            f"| {i} | {at['norm', 0]:.3f} | {at['norm', -1]:.3f} | {mean(heads, 'slope')} | "
            f"{mean(heads, 'rest_slope')} | {counts} | {at['logit_range', 0]:.1f} | {at['logit_range', -1]:.1f} | "
            f"{at['largest', -1]:.2f} | {data['factors'][i]:.2f} |"
        )
    return lines


def named_heads(data: Data) -> list[str]:
    """Every head that is not flat, as layer.head with its slope."""
    lines = []
    for verdict in ("saturates", "partly", "grows"):
        heads = sorted((h for h in heads_of(data) if h["verdict"] == verdict), key=lambda h: h["slope"])
        told = ", ".join(f"{h['layer']}.{h['head']} ({signed(h['slope'])} ± {h['error']:.2f})" for h in heads)
        lines.append(f"- **{verdict}** (layer.head): {told or 'none'}.")
    return [*lines, "- **flat**: all others."]


def verdicts(record: Data) -> list[str]:
    lines = ["| model | claim | found | verdict |", "| --- | --- | --- | --- |"]
    for data in record["models"]:
        lines += claim_rows(data)
    return lines


def claim_rows(data: Data) -> list[str]:
    name, heads = data["model"], [h for h in heads_of(data) if h["slope"] is not None]
    falling = sum(h["verdict"] == "saturates" for h in heads)
    share = falling / len(heads)
    slopes = [h["slope"] for h in heads]
    rows = [
        f"| {name} | the norm falls like 1/L | {falling} of {len(heads)} heads, mean slope {mean(heads, 'slope')} | "
        f"{'holds' if share > 0.9 else 'holds for some heads' if falling else 'does not hold'} |"
    ]
    if name.endswith(RANDOM):
        return rows
    later = rank_correlation([float(h["layer"]) for h in heads], slopes)
    sure = max(0.3, 2 / math.sqrt(len(heads) - 1))  # two standard errors of a rank correlation by chance
    so = "holds" if falling else "slopes are ordered so, but none saturates"
    growing = sum(h["range_slope"] >= 1 for h in heads)
    rest = sum(h["rest_slope"] <= data["criterion"]["saturates"] for h in heads)
    return [
        *rows,
        f"| {name} | later layers saturate more | rank correlation of layer and slope {signed(later)} (negative if "
        f"the claim holds) | {so if later < -sure else 'the opposite holds' if later > sure else 'not seen'} |",
        f"| {name} | logits are bounded, as the proof assumes | the range grows by 1 or more per e-fold in {growing} "
        f"of {len(heads)} heads | {'holds' if growing < 0.1 * len(heads) else 'does not hold'} |",
        f"| {name} | only the attention to the first key prevents it | without that key {rest} of {len(heads)} heads "
        f"saturate | {'holds' if rest > 0.5 * len(heads) else 'does not hold'} |",
    ]


MEANING = """\
## What a falling norm would imply, and what not

To first order, if the logits of a row change by δ, its weights change by at most ‖J‖·‖δ‖₂. If each of L logits is off
by ε, then ‖δ‖₂ = ε√L, and a norm of 1/L leaves an error of ε/√L in the weights. The output of a head depends on the sum
of the absolute changes of its weights, which can still be as large as ε at any length. (For uniform weights and errors
±ε it is exactly ε: the maximum of ‖Jδ‖₁ over |δᵢ| ≤ 1 is the largest 4s(1 − s), where s is the weight of a set of
keys.) So a norm of 1/L does not prove that a smaller head would do; it is a reason to test it. `deadweight compress`
measures what a smaller head costs.

The *factor* of a layer is the `--saturation` of `deadweight allocate plan`: 1 for the layer with the largest mean
norm at the longest length, and 1 − log(largest/own)/log 25, at least 0.125, for the others (`saturation/slopes.py`
derives it and states its assumptions)."""


def figure(record: Data, file: Path) -> None:
    """A row of panels for each model."""
    models = record["models"]
    picture, axes = pyplot().subplots(
        len(models), 3, figsize=(14, 3.4 * len(models)), layout="constrained", squeeze=False
    )
    for row, data in zip(axes, models, strict=True):
        draw_panels(picture, row, data)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
