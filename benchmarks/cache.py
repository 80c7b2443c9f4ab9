"""Bytes of the key-value cache against perplexity: ours and what others do, same model, same texts, one run.

python benchmarks/cache.py run MODEL --judge wiki=TEST.txt --judge book=BOOK.txt --windows 16
python benchmarks/cache.py report --markdown docs/cache.md

Everything is calibrated on the mixture of texts that comes with the package (--text for another one), judged in windows
of 1,024 tokens that do not overlap, taken evenly from each text, and not healed. Bytes count all that is stored. What
is in the record already is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cache_report import figure, page
from cache_rivals import Rival, blocks, kivi, principal, rotated_blocks, turboquant
from torch.nn import functional as F

from deadweight.compress.attention_calls import observing
from deadweight.compress.cache_moments import CacheMoments, CacheRecorder
from deadweight.compress.calibration import Batch, token_windows
from deadweight.compress.code_cache import MeasuredModel, empty_moments, measure_model
from deadweight.compress.coded_model import allocate, with_coded_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.judge import run_model
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import Settings
from deadweight.progress import silent
from deadweight.report import record

RESULTS = Path(__file__).parent / "results" / "cache.json"
SHARES = (0.25, 0.19, 0.125, 0.31, 0.1, 0.375, 0.5)  # of ours, in the order in which they are run
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Row:
    """One method at one size on one text."""

    model: str
    method: str
    source: str
    bits: float  # per number of the cache, everything included
    text: str
    windows: int
    loss: float
    rise: float  # of perplexity, relative
    seconds: float

    @property
    def key(self) -> tuple[str, str, float, str, int]:
        return self.model, self.method, round(self.bits, 3), self.text, self.windows


@torch.no_grad()
def loss_of(model: Any, batches: tuple[Batch, ...]) -> float:
    """Nats per token."""
    total = tokens = 0.0
    for batch in batches:
        logits = run_model(model, batch).logits[:, :-1].float().flatten(0, 1)
        goal = batch["input_ids"][:, 1:].flatten()
        total += float(F.cross_entropy(logits, goal, reduction="sum"))
        tokens += len(goal)
    return total / tokens


def windows_of(work: MeasuredModel, model: str, file: str, count: int, length: int) -> tuple[Batch, ...]:
    """Windows taken evenly from the whole text."""
    rows = token_windows(work.source, model, file, 1 << 30, length)
    at = torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()
    device = work.calibration.measure[0]["input_ids"].device
    return tuple({"input_ids": row[None].to(device)} for row in rows[at])


def rivals(known: dict[str, CacheMoments]) -> Iterator[Rival]:
    yield blocks(8)
    yield blocks(4)
    yield rotated_blocks(4)
    for bits in (4, 3, 2):
        yield principal(bits, known)
        yield turboquant(bits)
        if bits != 3:
            yield kivi(bits)


@app.command()
def run(
    model: str,
    judge: Annotated[list[str], typer.Option(help="NAME=FILE, several times.")],
    name: Annotated[str, typer.Option(help="The model's name in the record.")] = "SmolLM2-135M",
    text: Annotated[str | None, typer.Option(help="Calibration text; default: the mixture.")] = None,
    windows: int = 16,
    length: int = 1024,
    share: Annotated[list[float], typer.Option(help="Sizes of our cache, several times.")] = list(SHARES),  # noqa: B006
    others: Annotated[bool, typer.Option(help="Run the other methods too.")] = True,
    results: Path = RESULTS,
) -> None:
    rows = [Row(**r) for r in record.read_rows(results)[1]] if results.exists() else []
    done = {row.key for row in rows}
    source, precision = open_streamed(model, None)
    start = time.perf_counter()
    job = CompressionJob(source, model, None, Settings(text=text, length=length), precision, silent)
    work = measure_model(job)
    typer.echo(f"measured in {time.perf_counter() - start:.0f} s", err=True)
    texts = {n: windows_of(work, model, file, windows, length) for n, file in (j.split("=", 1) for j in judge)}
    before = {n: loss_of(source.module, batches) for n, batches in texts.items()}
    setting = record.circumstances() | {"length": length, "calibration": text or "mixture"}

    def keep(method: str, origin: str, bits: float, n: str, loss: float, seconds: float) -> None:
        rise = math.expm1(loss - before[n])
        rows.append(Row(name, method, origin, bits, n, len(texts[n]), loss, rise, round(seconds, 1)))
        record.write_rows(results, setting, rows)
        typer.echo(f"{method:36s} {bits / 16:6.1%} {n}: {rise:+.2%}", err=True)

    for size in share:
        coded_rows(work, size, texts, name, done, keep)
    if not others:
        return
    known = remeasured(work)
    for rival in rivals(known):
        for n, batches in texts.items():
            if (name, rival.name, round(rival.bits, 3), n, len(batches)) in done:
                continue
            start = time.perf_counter()
            with observing(source.module, rival):
                loss = loss_of(source.module, batches)
            keep(rival.name, rival.source, rival.bits, n, loss, time.perf_counter() - start)


def coded_rows(work: MeasuredModel, share: float, texts: dict[str, Any], name: str, done: Any, keep: Any) -> None:
    plan = allocate(work.options, share, work.tokens)
    bits = 16 * plan.share
    if all((name, "ours", round(bits, 3), n, len(batches)) in done for n, batches in texts.items()):
        return
    module, _ = with_coded_cache(work.source.module, plan, work.precision)
    for n, batches in texts.items():
        start = time.perf_counter()
        keep("ours", "this package", bits, n, loss_of(module, batches), time.perf_counter() - start)


def remeasured(work: MeasuredModel) -> dict[str, CacheMoments]:
    """Means and covariances for the rivals that are calibrated: the same text, without gradients."""
    known = {c.heads.path: empty_moments(c.heads, c.rates) for c in work.caches}
    with observing(work.source.module, CacheRecorder(known)), torch.no_grad():
        for batch in work.calibration.measure:
            run_model(work.source.module, batch, words=False)
    for moments in known.values():
        moments.graded = max(moments.graded, 1)
    return known


@app.command()
def report(results: Path = RESULTS, markdown: Path | None = None) -> None:
    setting, rows = record.read_rows(results)
    record.show_page(page(setting, rows), markdown)
    if markdown is not None:
        figure(rows, markdown.with_suffix(".svg"))


if __name__ == "__main__":
    app()
