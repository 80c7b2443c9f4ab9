"""Smaller heads, side by side: ours and what others do, same model, same budgets, same calibration and test text.

python benchmarks/heads.py run MODEL --calibrate VALID.txt --judge TEST.txt --json benchmarks/results/heads.json
python benchmarks/heads.py run ENCODER --embeddings --windows 64 --length 128 … (the same)
python benchmarks/heads.py report benchmarks/results/heads.json --markdown docs/heads.md

A language model is judged by its perplexity in windows that do not overlap, at shares of the key-value cache; an
encoder (--embeddings) by the cosine between its sentence embeddings before and after, at half of its attention weights.
Nobody heals. What is in the record already is not run again.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import typer
from heads_baselines import (
    Made,
    calibrated,
    heads_kept,
    importance,
    norms,
    plain,
    same_ranks,
    smaller,
    statistics,
    whitened_matrices,
)
from heads_report import figure, page
from torch import Tensor
from torch.nn import functional as F

from deadweight.compress import budget
from deadweight.compress.calibration import Calibration, calibration, tokenizer_for
from deadweight.compress.choose import Work, by_share
from deadweight.compress.judge import judge
from deadweight.compress.locate import Heads, locate
from deadweight.compress.moments import Moments, measure
from deadweight.compress.observe import attend_alike
from deadweight.compress.run import empty_moments, opened
from deadweight.compress.truncate import Spaces
from deadweight.report.record import circumstances, show_record
from deadweight.source.model import Source
from deadweight.source.plain_text import read_text
from deadweight.source.tokens import encoded, tokenizer_of

What = Literal["kv", "attention"]
SHARES = {"kv": (0.5, 0.75, 0.9, 0.625), "attention": (0.5,)}  # in the order in which they are run
WINDOW = 1024  # tokens of a window of the test text
TIMED = 3  # batches that say how long a forward pass takes
T = TypeVar("T")


class Bench:
    """A model, its calibration text, and everything that is measured of it: once, when first asked for, timed."""

    def __init__(self, source: Source, text: Calibration, what: What) -> None:
        self.source, self.text, self.what = source, text, what
        self.seconds: dict[str, float] = {}

    @property
    def model(self) -> Any:
        return self.source.module

    def timed(self, stage: str, job: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = job()
        self.seconds[stage] = time.perf_counter() - start
        typer.echo(f"{stage}: {self.seconds[stage]:.0f} s", err=True)
        return found

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward passes over all of the calibration text, from the first few batches."""
        assert self.heads  # then attention is as fast as it will be
        few = self.text.measure[:TIMED]
        start = time.perf_counter()
        with torch.no_grad():
            for batch in few:
                self.model(**batch)
        return (time.perf_counter() - start) * len(self.text.measure) / len(few)

    @cached_property
    def heads(self) -> tuple[Heads, ...]:
        return self.timed("locating", self.located)

    def located(self) -> tuple[Heads, ...]:
        found = locate(self.source)
        attend_alike(self.model)
        return found

    @cached_property
    def moments(self) -> dict[str, Moments]:
        return self.measured("measuring")

    @cached_property
    def apart(self) -> dict[str, Moments]:
        """What is measured of heads that share nothing."""
        return self.measured("measuring, unmerged", merge=1)

    @cached_property
    def before_positions(self) -> dict[str, Moments]:
        return self.measured("measuring, late", late=True)

    def measured(self, stage: str, *, merge: int | None = None, late: bool = False) -> dict[str, Moments]:
        empty = {h.path: empty_moments(h, self.what, "slim", merge, late) for h in self.heads}
        return self.timed(stage, lambda: measure(self.model, empty, self.text.measure))

    @cached_property
    def merged(self) -> list[Spaces]:
        moments = self.moments
        return self.timed("dimensions", lambda: [budget.spaces_of(h, moments[h.path], self.model) for h in self.heads])

    @cached_property
    def unmerged(self) -> list[Spaces]:
        moments = self.apart
        return self.timed(
            "dimensions, unmerged", lambda: [budget.spaces_of(h, moments[h.path], self.model) for h in self.heads]
        )

    @cached_property
    def late(self) -> list[Spaces]:
        moments = self.before_positions
        return self.timed(
            "dimensions, late", lambda: [budget.spaces_of(h, moments[h.path], self.model) for h in self.heads]
        )

    @cached_property
    def statistics(self) -> Any:
        heads = self.heads
        return self.timed("statistics", lambda: statistics(self.model, heads, self.text.measure))

    @cached_property
    def importance(self) -> dict[str, Tensor]:
        heads = self.heads
        return self.timed("importance", lambda: importance(self.model, heads, self.text.measure))


@dataclass(frozen=True)
class Rival:
    """A way to make heads smaller, and which stages of measuring it needs."""

    stages: tuple[str, ...]
    make: Callable[[Bench, float], Made]


def ours(method: budget.Method, spaces: str) -> Callable[[Bench, float], Made]:
    """`deadweight.compress` from where its measurements end, so that they can be shared by all budgets."""

    def make(bench: Bench, share: float) -> Made:
        work = Work(bench.source, getattr(bench, spaces), {}, bench.text, bench.what, method, "slim", None)
        chosen, ranks = by_share(work, share)
        return Made(chosen.module, ranks.share)

    return make


MEASURED = ("locating", "measuring", "dimensions", "judging")
RIVALS = {
    "ours, knapsack": Rival(MEASURED, ours("knapsack", "merged")),
    "ours, by layer": Rival(MEASURED, ours("layer", "merged")),
    "ours, uniform": Rival(MEASURED, ours("uniform", "merged")),
    "ours, knapsack, not merged": Rival(
        ("locating", "measuring, unmerged", "dimensions, unmerged", "judging"), ours("knapsack", "unmerged")
    ),
    "ours, knapsack, late": Rival(
        ("locating", "measuring, late", "dimensions, late", "judging"), ours("knapsack", "late")
    ),
    "whitened SVD of matrices": Rival(
        ("locating", "statistics"),
        lambda b, share: whitened_matrices(b.model, b.heads, b.statistics, share, b.what),
    ),
    "calibrated SVD, uniform": Rival(
        ("locating", "statistics"),
        lambda b, share: same_ranks(b.model, b.heads, lambda h: calibrated(b.model, h, b.statistics), share, b.what),
    ),
    "plain SVD of heads": Rival(
        ("locating",), lambda b, share: same_ranks(b.model, b.heads, lambda h: plain(b.model, h), share, b.what)
    ),
    "planes and places by norm": Rival(
        ("locating",), lambda b, share: same_ranks(b.model, b.heads, lambda h: norms(b.model, h), share, b.what)
    ),
    "whole heads": Rival(
        ("locating", "importance"),
        lambda b, share: smaller(
            b.model, [norms(b.model, h) for h in b.heads], heads_kept(b.heads, b.importance, share), b.what
        ),
    ),
}
MERGING = {
    "ours, knapsack, not merged",
    "ours, knapsack, late",
}  # differ from the others only where a cache is to shrink


# Judging


@torch.no_grad()
def loss_on(model: Any, ids: Tensor, batch: int = 2) -> float:
    """Nats per token of the next token, in windows that do not overlap."""
    count = (len(ids) - 1) // WINDOW
    rows, goals = (ids[i : i + count * WINDOW].view(count, WINDOW) for i in (0, 1))
    total = 0.0
    for inputs, targets in zip(rows.split(batch), goals.split(batch), strict=True):
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return total / (count * WINDOW)


def tokens_to_judge(source: Source, spec: str, text: str, tokens: int) -> Tensor:
    tokenizer, vocabulary = tokenizer_for(source, spec)
    ids = encoded(read_text(text), tokenizer, vocabulary, source.name)
    whole = min(tokens, len(ids) - 1) // WINDOW * WINDOW
    if whole == 0:
        raise typer.BadParameter(f"found {min(tokens, len(ids)):,} tokens to judge by; expected a window of {WINDOW}")
    return torch.tensor(ids[: whole + 1])


def sentences(text: str, count: int) -> list[str]:
    """The first paragraphs of a text that are no headings and of more than a few words."""
    lines = [line.strip() for line in read_text(text).decode("utf-8").splitlines()]
    return [line for line in lines if not line.startswith("=") and len(line.split()) > 4][:count]


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, lines: list[str], batch: int = 32) -> Tensor:
    """Mean pooling over the tokens of each line."""
    found = []
    for i in range(0, len(lines), batch):
        read = tokenizer(lines[i : i + batch], padding=True, truncation=True, max_length=128, return_tensors="pt")
        states = model(**read).last_hidden_state.double()
        mask = read["attention_mask"].double().unsqueeze(-1)
        found.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(found)


Judge = Callable[[Any], dict[str, float]]


def judge_of(source: Source, spec: str, text: str, tokens: int, what: What) -> Judge:
    if what == "kv":
        ids = tokens_to_judge(source, spec, text, tokens)

        def by_loss(model: Any) -> dict[str, float]:
            loss = loss_on(model, ids)
            return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

        return by_loss
    tokenizer, lines = tokenizer_of(spec), sentences(text, tokens // 32)
    first = embeddings(source.module, tokenizer, lines)

    def by_cosine(model: Any) -> dict[str, float]:
        cosines = F.cosine_similarity(first, embeddings(model, tokenizer, lines), dim=-1)
        return {"cosine": float(cosines.mean()), "worst": float(cosines.min()), "sentences": len(lines)}

    return by_cosine


# Running


def run(
    model: str,
    calibrate: Annotated[str, typer.Option(help="text to calibrate on")],
    judge_text: Annotated[str, typer.Option("--judge", help="text to judge by: another one")],
    json_file: Annotated[Path, typer.Option("--json", help="the record: what it holds is not run again")],
    windows: Annotated[int, typer.Option(help="windows of the calibration text")] = 40,
    length: Annotated[int, typer.Option(help="tokens of each")] = 512,
    tokens: Annotated[int, typer.Option(help="tokens of the test text; an encoder reads a line for every 32")] = 8192,
    encoder: Annotated[bool, typer.Option("--embeddings", help="an encoder, judged by its embeddings")] = False,
    name: Annotated[str, typer.Option(help="what the record calls the model, if not by its folder")] = "",
    only: Annotated[str, typer.Option(help="only methods whose name contains this")] = "",
) -> None:
    """Every method at every budget, written to the record one after the other."""
    what: What = "attention" if encoder else "kv"
    record = json.loads(json_file.read_text(encoding="utf-8")) if json_file.is_file() else {}
    part = record.setdefault("embeddings" if encoder else "language", {"rows": []})
    known = {(row["method"], row["asked"]) for row in part["rows"]}
    names = [n for n in RIVALS if only in n and not (encoder and n in MERGING)]
    missing = [(n, share) for share in SHARES[what] for n in names if (n, share) not in known]
    if not missing:
        return
    source, _ = opened(model, None)
    text = calibration(source, model, text=calibrate, windows=windows, length=length)
    setting = {
        **circumstances(),
        "model": name or Path(model).name,
        "calibrated": Path(calibrate).name,
        "judged": Path(judge_text).name,
        "windows": windows,
        "length": length,
        "calibration_tokens": text.tokens,
        "tokens": tokens,
        "window": WINDOW,
    }
    if part.setdefault("setting", setting) != setting:
        raise typer.BadParameter(f"{json_file} records another setting; expected the same, or another file")
    bench, judged = Bench(source, text, what), judge_of(source, model, judge_text, tokens, what)
    part["seconds_forward"] = bench.forward
    part["original"] = judged(source.module)
    typer.echo(f"original: {part['original']}", err=True)
    for method, share in missing:
        part["rows"].append(row_of(bench, method, share, judged))
        part["stages"] = {**part.get("stages", {}), **bench.seconds}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def row_of(bench: Bench, name: str, share: float, judged: Judge) -> dict[str, Any]:
    """One method at one budget. Its seconds are those of all it needs, as if it had been run alone."""
    rival = RIVALS[name]
    before = sum(bench.seconds.values())
    start = time.perf_counter()
    made = rival.make(bench, share)
    own = time.perf_counter() - start - (sum(bench.seconds.values()) - before)
    if "judging" in rival.stages and "judging" not in bench.seconds:
        bench.timed("judging", lambda: judge(bench.model, made.module, bench.text.judge))
    seconds = own + sum(bench.seconds[stage] for stage in rival.stages)
    found = {"method": name, "asked": share, "share": made.share, **judged(made.module), "seconds": seconds}
    found["seconds_forward"] = bench.forward
    typer.echo(json.dumps(found), err=True)
    gc.collect()  # modules hold cycles, and each is as large as the model
    return found


def report(
    recorded: Path, markdown: Annotated[Path | None, typer.Option(help="write the page and its figure here")] = None
) -> None:
    """The page of a record."""
    show_record(recorded, page, figure, markdown)


app = typer.Typer(add_completion=False)
app.command()(run)
app.command()(report)

if __name__ == "__main__":
    app()
