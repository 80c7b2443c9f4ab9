"""What healing gives back: compressed models before and after it, on text that nothing was measured or trained on.

python benchmarks/heal.py text enwik8 heal.txt --megabytes 45 --without TEST.txt
python benchmarks/heal.py run MODEL --calibrate VALID.txt --heal-text heal.txt --judge TEST.txt --keep-kv 0.5 \\
    --seconds 300 --json benchmarks/results/heal.json [--late] [--out FOLDER]
python benchmarks/heal.py report benchmarks/results/heal*.json --markdown docs/healing.md

`text` makes of a dump of Wikipedia articles in the style of WikiText, which has its own way with punctuation and writes
<unk> for rare words, but for articles that the text to judge by has too.
`run` times a few steps first, so that healing ends in time; what is judged is the folder that `compress` has written.
"""

from __future__ import annotations

import collections
import copy
import html
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import deadweight
from deadweight.compress.calibration import calibration, text_to_heal_on, token_windows
from deadweight.compress.heal import BLOCKWISE, healed
from deadweight.compress.judge import called
from deadweight.compress.run import opened
from deadweight.report.record import circumstances

app = typer.Typer(pretty_exceptions_enable=False)
Record = dict[str, Any]
WINDOW = 1024  # tokens of a window that is judged
TRIAL = 16  # steps that are timed, a quarter of them block by block
TAGS = r"<(ref|math|gallery|table|pre|nowiki|timeline)[^>]*>.*?</\1>"
LINKED = r"\[\[(?:image|file|category|[a-z\-]{2,12}):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]"  # pictures, other languages
WORD = re.compile(r"\S+")
WORDS = """\
Below zero: text in the style of the judged one was seen in healing, and the original has not had that; it is what the
small models learn from, but on that text. Each row is one run; another seed or another text was not tried.

heal.txt is 44 MB of articles of enwik8 in WikiText's style, without those of the text to judge by (there were none):
`heal.py text enwik8 heal.txt --megabytes 45 --without wikitext-2.test.txt` (in these runs it still wrote "1 @ , @ 234"
for WikiText's "1 @,@ 234"). Then, for every row, `heal.py run MODEL --calibrate wikitext-2.valid.txt --heal-text
heal.txt --judge wikitext-2.test.txt --keep-kv 0.5 --step 4 --seconds 250 --rate 3e-4 --json FILE`, with `--late` for
late keys, and `heal.py report FILES --markdown docs/healing.md`."""


def articles(dump: str) -> Iterator[tuple[str, str]]:
    """Titles and texts without markup; what only points elsewhere is left out."""
    for found in re.finditer(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        text = html.unescape(html.unescape(found[2]))
        if not text.startswith("#"):
            yield html.unescape(found[1]), without_markup(text)


def without_markup(text: str) -> str:
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(TAGS, "", text, flags=re.DOTALL | re.IGNORECASE)
    for _ in range(4):  # templates in templates
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", "", text)
    for _ in range(2):
        text = re.sub(LINKED, "", text, flags=re.IGNORECASE)
    text = re.sub(r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:[^ \]]*( [^\]]*)?\]", r"\1", text)
    return re.sub(r"<[^>]*>|'''?", "", text).replace("\u00a0", " ")


def spaced(line: str) -> str:
    """Words and marks with a space between them, as WikiText has it."""
    line = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", line)
    line = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", line)
    line = re.sub(r"(?<!@)([,;:!?()\[\]\"“”])(?!@)", r" \1 ", line)
    line = re.sub(r"\.(?=\s|$)", " .", line)
    line = re.sub(r"(?<=\w)'(s?)(?=\s|$)", r" '\1", line)
    return " ".join(line.split())


def in_style(title: str, text: str) -> Iterator[str]:
    """The lines of one article: its title, headings, and paragraphs; no lists."""
    yield from (" ", f" = {title} = ", " ")
    for line in text.splitlines():
        heading = re.fullmatch(r"(=+)\s*(.*?)\s*=+\s*", line)
        if heading:
            marks = " ".join("=" * len(heading[1]))
            yield from (" ", f" {marks} {spaced(heading[2])} {marks} ", " ")
        elif len(line) > 80 and line[0] not in "*#:;|!{ ":
            yield f" {spaced(line)} "


@app.command()
def text(
    dump: Annotated[Path, typer.Argument(help="the XML of a dump, such as enwik8")],
    out: Annotated[Path, typer.Argument(help="the text to write")],
    megabytes: Annotated[float, typer.Option(help="of text, at most")] = 40.0,
    without: Annotated[Path | None, typer.Option(help="a text in that style: none of its articles")] = None,
    words: Annotated[int, typer.Option(help="the most frequent ones that are kept; others are <unk>")] = 33_278,
) -> None:
    """Articles in the style of WikiText."""
    others = "" if without is None else without.read_text(encoding="utf-8")
    gone = set(re.findall(r"^ = ([^=\n]+) = $", others, re.MULTILINE))
    lines: list[str] = []
    size = left_out = 0
    for title, body in articles(dump.read_text(encoding="utf-8", errors="ignore")):
        found = list(in_style(spaced(title), body))
        left_out += spaced(title) in gone
        if len(found) > 5 and size < megabytes * 1e6 and spaced(title) not in gone:
            lines += found
            size += sum(len(line.encode()) for line in found)
    counts = collections.Counter(word for line in lines for word in line.split())
    known = {word for word, _ in counts.most_common(words)}
    told = "\n".join(WORD.sub(lambda w: w[0] if w[0] in known else "<unk>", line) for line in lines)
    out.write_text(told + "\n", encoding="utf-8")
    typer.echo(
        f"{len(told.encode()):,} bytes, {sum(counts.values()):,} words, {len(counts):,} different ones; "
        f"{left_out} articles left out"
    )


@torch.no_grad()
def loss_of(model: Any, windows: Tensor) -> float:
    """Nats per token over windows that do not overlap."""
    device = next(model.parameters()).device
    total = count = 0.0
    for ids in windows.to(device).split(16 if device.type == "cuda" else 2):
        logits = called(model, {"input_ids": ids}).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        count += ids[:, 1:].numel()
    return total / count


def steps_for(seconds: float, original: Any, compressed: Any, batches: Any, rate: float) -> int:
    """As many steps as fit, by the time of a few."""
    stamps: list[float] = []
    trial = copy.deepcopy(compressed)
    healed(original, trial, batches, TRIAL, rate=rate, progress=lambda *_: stamps.append(time.perf_counter()))
    first = TRIAL // 4
    blockwise = (stamps[first - 1] - stamps[1]) / (first - 2)
    whole = (stamps[-1] - stamps[first + 1]) / (TRIAL - first - 2)
    typer.echo(f"a step takes {blockwise:.3f} s block by block, {whole:.3f} s as a whole")
    return max(
        TRIAL,
        int(min(seconds / (0.25 * blockwise + 0.75 * whole), BLOCKWISE + (seconds - BLOCKWISE * blockwise) / whole)),
    )


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="folder of the original")],
    calibrate: Annotated[str, typer.Option(help="text to measure on")],
    heal_text: Annotated[str, typer.Option(help="text to heal on")],
    judge: Annotated[str, typer.Option(help="text to judge by")],
    keep_kv: Annotated[float, typer.Option(help="share of the cache")] = 0.5,
    late: Annotated[bool, typer.Option("--late", help="keys before rotary positions")] = False,
    seconds: Annotated[float, typer.Option(help="of healing, at most about")] = 300.0,
    rate: Annotated[float, typer.Option(help="learning rate")] = 2e-4,
    step: Annotated[int | None, typer.Option(help="sizes are multiples of this; none: as `compress` chooses")] = None,
    windows: Annotated[int, typer.Option(help="to measure on")] = 40,
    length: Annotated[int, typer.Option(help="tokens of each")] = 512,
    judged: Annotated[int, typer.Option(help="windows of the text to judge by, at most")] = 1_000_000,
    out: Annotated[Path | None, typer.Option(help="keep the healed model here")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    """One budget: compressed, judged, healed, judged again."""
    source, _ = opened(model, None)
    window = min(WINDOW, getattr(source.config, "max_position_embeddings", WINDOW))
    rows = token_windows(source, model, judge, judged, window)
    original = loss_of(source.module, rows)
    typer.echo(f"original: perplexity {math.exp(original):.3f} on {rows.numel():,} tokens")
    settings: dict[str, Any] = {"cache": "low-rank", "keep_kv": keep_kv, "late": late, "text": calibrate}
    settings |= {"windows": windows, "length": length, "step": step}
    start = time.perf_counter()
    small = deadweight.compress(model, **settings).module
    compressing = time.perf_counter() - start
    before = loss_of(small, rows)
    typer.echo(f"compressed: {math.expm1(before - original):+.2%}, {compressing:.0f} s")
    found = calibration(source, model, text=calibrate, windows=windows, length=length)
    batches = text_to_heal_on(source, model, calibrate, heal_text, found, TRIAL)
    steps = steps_for(seconds, source.module, small, batches, rate)
    tokens = steps * batches[0]["input_ids"].numel()
    del small
    with tempfile.TemporaryDirectory() as folder:
        target = out or Path(folder) / "healed"
        done = deadweight.compress(
            model, target, heal=steps, heal_text=heal_text, heal_rate=rate, overwrite=True, **settings
        )
        saved: Any = deadweight.load(str(target))
        after = loss_of(saved.to(next(source.module.parameters()).device).float().eval(), rows)
    typer.echo(
        f"healed: {math.expm1(after - original):+.2%} after {steps:,} steps, {tokens:,} tokens, "
        f"{done.seconds_healing:.0f} s; {done.share:.1%} of the cache; {' '.join(done.notes)}"
    )
    record = {
        "setting": {
            "model": Path(model).name,
            "calibrated": Path(calibrate).name,
            "healed": Path(heal_text).name,
            "judged": Path(judge).name,
            "judged_tokens": rows.numel(),
            "window": window,
            "calibration_tokens": done.tokens,
            "step": step,
            **circumstances(),
        },
        "original": original,
        "rows": [
            {
                "keep_kv": keep_kv,
                "share": done.share,
                "late": late,
                "rate": rate,
                "steps": done.healed,
                "tokens": tokens,
                "seconds": done.seconds_healing,
                "before": before,
                "after": after,
            }
        ],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def joined(records: list[Record]) -> Record:
    """Several runs with the same settings as one."""
    first = records[0]
    for other in records[1:]:
        if other["setting"] != first["setting"]:
            raise typer.BadParameter(f"{other['setting']} is not {first['setting']}: other settings")
    rows = [row for record in records for row in record["rows"]]
    rows.sort(key=lambda r: (-r["keep_kv"], r["late"], r["rate"]))
    return {**first, "original": sum(r["original"] for r in records) / len(records), "rows": rows}


def page(record: Record) -> str:
    s, original = record["setting"], record["original"]
    lines = [
        "# What healing gives back",
        "",
        f"Written by `benchmarks/heal.py`: {s['model']} on {s['machine']}, torch {s['torch']}, transformers "
        f"{s['transformers']}. Calibrated on {s['calibration_tokens']:,} tokens of {s['calibrated']}, healed on "
        f"{s['healed']}, judged on all {s['judged_tokens']:,} tokens of {s['judged']} in windows of {s['window']:,} "
        f"that do not overlap, where the original's perplexity is {math.exp(original):.2f}. Healing is distillation "
        "from the original; nothing of the text to judge by was seen. Runs shared one GPU, so that seconds are an "
        "upper limit." + (f" Sizes in steps of {s['step']}." if s["step"] else ""),
        "",
        "| cache kept | keys | perplexity, compressed | healed | steps | tokens | seconds | learning rate |",
        "| --- " * 8 + "|",
    ]
    for r in record["rows"]:
        lines.append(
            f"| {r['share']:.1%} | {'late' if r['late'] else 'as used'} | {math.expm1(r['before'] - original):+.1%} | "
            f"{math.expm1(r['after'] - original):+.1%} | {r['steps']:,} | {r['tokens']:,} | {r['seconds']:.0f} | "
            f"{r['rate']:.0e} |"
        )
    return "\n".join([*lines, "", *WORDS.splitlines()]) + "\n"


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="what `run` has written")],
    json_file: Annotated[Path | None, typer.Option("--json", help="write all of it as one record")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the page here")] = None,
) -> None:
    """The page of one or several records."""
    record = joined([json.loads(file.read_text(encoding="utf-8")) for file in files])
    told = page(record)
    Console().print(told, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(told, encoding="utf-8")


if __name__ == "__main__":
    app()
