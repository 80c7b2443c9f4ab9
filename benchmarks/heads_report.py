"""The heads benchmark's page and figure, from its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deadweight.report.figure import pyplot, save

Record = dict[str, Any]
OURS = "ours, knapsack"
LEAST = 1e-4  # that a logarithmic axis shows: what rises less, or falls, is drawn there
MANY = 10.0  # times the perplexity: from here on percents say nothing
WORDS = """\
- **ours**: `deadweight.compress`, slim: dimensions by second-order predicted loss. The key heads of a layer share their
  values, and their keys as a few complex numbers at every rotary frequency, which every query head reads in its own
  way; keys are cached as they are used. How much each layer keeps: by an exact knapsack over all of them, by one over
  layers, or the same share everywhere. *Not merged*: nothing is shared (`merge=1`); every head drops whole planes, and
  those that stay are stretched and turned to make up. *Late* (`late=True`): keys are cached before rotary positions, as
  with the SVD of matrices, and expanded and turned again at every step of decoding, which is not counted.
- **whitened SVD of matrices**: SVD-LLM (Wang et al., arXiv 2403.07378): W_K and W_V of a layer each truncated to one
  rank after whitening their inputs by Cholesky, without its later fine-tuning. The cache holds the numbers in between,
  for keys before rotary positions: every step of decoding must expand and turn all cached keys again, which is not
  counted.
- **calibrated SVD, uniform**: the same rank for every head, for the least squared error of what W_O makes of the heads'
  outputs, by their second moments; rotary planes by √(E‖q‖² E‖k‖²).
- **plain SVD of heads**: CLOVER (Meng et al., arXiv 2411.17426): singular values of W_V W_O of every head, and of
  W_Q W_K where there are no rotary positions; with them, planes by their norm: the paper's pruning does not cover that.
- **planes and places by norm**: planes by ‖W_Q‖·‖W_K‖, places of values by ‖W_V‖·‖W_O‖ (CLOVER's "vanilla pruning").
- **whole heads**: key heads with their query heads by the gradient criterion of Michel et al. (arXiv 1905.10650)."""


def page(record: Record) -> str:
    lines = ["# Smaller heads, side by side", ""]
    if "language" in record:
        lines += language(record["language"])
    lines += ["## The methods", "", *WORDS.splitlines(), ""]
    if "embeddings" in record:
        lines += encoder(record["embeddings"])
    return "\n".join(lines)


def language(part: Record) -> list[str]:
    s = part["setting"]
    shares = budgets(part)
    lines = [
        f"Written by `benchmarks/heads.py`: {s['model']}, calibrated on {s['calibration_tokens']:,} tokens of "
        f"{s['calibrated']} in windows of {s['length']}, judged on the first {s['tokens']:,} tokens of {s['judged']} "
        f"in windows of {s['window']:,} that do not overlap; no healing; torch {s['torch']}, transformers "
        f"{s['transformers']}, {s['machine']}. The original's perplexity is {part['original']['perplexity']:.2f}. By "
        "how much it rises, by the share of the key-value cache that may be kept; the best in bold:",
        "",
        line(["", *(f"{share:.1%}" for share in shares)]),
        line(["---"] * (len(shares) + 1)),
    ]
    best = {share: min(rows(part, share), key=lambda r: r["perplexity"]) for share in shares}
    for name in methods(part):
        cells = [cell(part, name, share, best[share]) for share in shares]
        lines.append(line([name, *cells]))
    return [
        *lines,
        "",
        "![perplexity against the share of the cache](heads.svg)",
        "",
        *verdicts(part, shares, best),
        "",
        *times(part, shares),
        "",
    ]


def rise(part: Record, row: Record) -> float:
    return row["perplexity"] / part["original"]["perplexity"] - 1


def rise_words(increase: float) -> str:
    return f"{100 * increase:+.1f} %" if increase < MANY else f"× {increase + 1:,.0f}"


def cell(part: Record, name: str, share: float, best: Record) -> str:
    found = [r for r in rows(part, share) if r["method"] == name]
    if not found:
        return "not run"
    words = rise_words(rise(part, found[0]))
    return f"**{words}**" if found[0] is best else words


def verdicts(part: Record, shares: list[float], best: dict[float, Record]) -> list[str]:
    """What the table says of ours, without anybody's opinion."""
    found = []
    for share in shares:
        others = [r for r in rows(part, share) if not r["method"].startswith("ours")]
        mine = next((r for r in rows(part, share) if r["method"] == OURS), None)
        if mine is None or not others:
            continue
        rival = min(others, key=lambda r: r["perplexity"])
        if best[share] is mine:
            first, after = "the best that was run", f"; the best of the others is {told(part, rival)}"
        else:
            first = f"behind {told(part, best[share])}"
            after = "" if best[share] is rival else f"; the best of the others is {told(part, rival)}"
        found.append(f"- At {share:.1%}: {told(part, mine)}, is {first}{after}.")
    return found


def told(part: Record, row: Record) -> str:
    return f"*{row['method']}*, {rise_words(rise(part, row))} with {row['share']:.1%} of the cache"


def times(part: Record, shares: list[float]) -> list[str]:
    lines = [
        f"Seconds from the loaded model to the smaller one, measuring included, at {shares[-1]:.1%}, and of the "
        "forward passes over the calibration text alone, timed in the same run. Ours includes its own judging on "
        "text held back. Cores were shared with other work, more at some times than at others: seconds are a "
        "coarse measure, and so are their ratios. What is really kept differs where sizes come in steps:",
        "",
        line(["", "seconds", "forward passes", "ratio", *(f"kept of {share:.1%}" for share in shares)]),
        line(["---"] * (len(shares) + 4)),
    ]
    for name in methods(part):
        own = {r["asked"]: r for r in part["rows"] if r["method"] == name}
        last = own[min(own)]["seconds"]
        forward = own[min(own)].get("seconds_forward", part["seconds_forward"])
        kept = [f"{own[share]['share']:.1%}" if share in own else "" for share in shares]
        lines.append(line([name, f"{last:.0f}", f"{forward:.0f}", f"{last / forward:.1f}", *kept]))
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in part["stages"].items())
    return [*lines, "", f"Stages: {stages}."]


def encoder(part: Record) -> list[str]:
    s = part["setting"]
    ordered = sorted(part["rows"], key=lambda r: -r["cosine"])
    return [
        "## Embeddings of sentences",
        "",
        f"{s['model']} with {ordered[0]['asked']:.0%} of its attention weights, no healing: calibrated on "
        f"{s['calibration_tokens']:,} tokens of {s['calibrated']} in windows of {s['length']}. The cosine between the "
        f"embeddings (mean pooling) of the original and the smaller model, over {ordered[0]['sentences']} paragraphs "
        f"of {s['judged']}, cut at 128 tokens. The SVD of matrices has all four of them truncated, each to a quarter "
        "of its rank, which is half of the weights; whole heads go by a random projection of the output, for want of a "
        "loss.",
        "",
        line(["", "mean cosine", "worst", "weights kept", "seconds"]),
        line(["---"] * 5),
        *(
            line([r["method"], f"{r['cosine']:.4f}", f"{r['worst']:.4f}", f"{r['share']:.1%}", f"{r['seconds']:.1f}"])
            for r in ordered
        ),
        "",
        f"The forward passes over the calibration text take {part['seconds_forward']:.1f} s.",
        "",
    ]


def budgets(part: Record) -> list[float]:
    return sorted({r["asked"] for r in part["rows"]}, reverse=True)


def methods(part: Record) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in part["rows"]))


def rows(part: Record, share: float) -> list[Record]:
    return [r for r in part["rows"] if r["asked"] == share]


def line(parts: list[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def figure(record: Record, file: Path) -> None:
    """Rise of the perplexity against the share that is really kept, one line per method."""
    part = record["language"]
    found, axes = pyplot().subplots(figsize=(10, 5))
    for name in methods(part):
        own = sorted((r["share"], max(rise(part, r), LEAST)) for r in part["rows"] if r["method"] == name)
        mine = name.startswith("ours")
        axes.plot(*zip(*own, strict=True), marker="o" if mine else "s", ls="-" if mine else "--", ms=4, label=name)
    axes.set(yscale="log", xlabel="share of the key-value cache", ylabel="rise of the perplexity (1 is 100 %)")
    axes.invert_xaxis()
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    found.tight_layout()
    save(found, file)
