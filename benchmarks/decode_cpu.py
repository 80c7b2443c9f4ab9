"""How much processor time a step of decoding takes on a CPU, from a coded cache and from the original's.

python benchmarks/decode_cpu.py MODEL
python benchmarks/decode.py report --markdown docs/decode.md

Both models read the same tokens. Then they decode in turns, a few tokens each, from caches that are cut back after
every turn. The time is that of the process on all its threads, which other processes on the machine disturb less than
a clock; the median over the turns counts. Computed in float32.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cache_measured import measured
from transformers import DynamicCache

from deadweight.compress.coded_model import allocate, with_coded_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import Settings
from deadweight.compress.streaming import gather_weights
from deadweight.progress import silent
from deadweight.report import record

RESULTS = Path(__file__).parent / "results" / "decode_cpu.json"
STEPS = 8  # of a turn
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Row:
    model: str
    tokens: int  # in the cache
    share: float  # of a 16-bit cache
    threads: int
    turns: int
    original: float  # milliseconds of processor time of a step
    coded: float


@torch.no_grad()
def read_prompt(model: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def milliseconds(model: Any, cache: DynamicCache, token: torch.Tensor) -> float:
    """The mean of a few steps."""
    start = time.process_time()
    for _ in range(STEPS):
        model(token, past_key_values=cache, use_cache=True)
    spent = time.process_time() - start
    cache.crop(-STEPS)
    return 1e3 * spent / STEPS


@app.command()
def run(
    model: str,
    name: Annotated[str, typer.Option(help="The model's name in the record.")] = "SmolLM2-135M",
    tokens: Annotated[int, typer.Option(help="In the cache.")] = 1024,
    share: Annotated[list[float], typer.Option(help="Sizes of our cache, several times.")] = [0.25, 0.125],  # noqa: B006
    turns: int = 9,
    threads: int = 1,
    kept: Annotated[Path | None, typer.Option(help="Measurements: read from here, or written there.")] = None,
    results: Path = RESULTS,
) -> None:
    torch.set_num_threads(threads)
    source, precision = open_streamed(model, "cpu")
    work = measured(CompressionJob(source, model, None, Settings(length=1024), precision, silent), kept)
    twins = {}
    for size in share:  # how good the maps are changes nothing: they are not fitted
        plan = allocate(work.options, size, tokens)
        twins[round(plan.share, 4)] = with_coded_cache(source.module, plan, work.precision)[0]
    for module in (source.module, *twins.values()):
        gather_weights(module)
    config: Any = source.config
    ids = torch.randint(3, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    rows = [Row(**r) for r in record.read_rows(results)[1]]
    own = read_prompt(source.module, ids)
    for size, twin in twins.items():
        coded = read_prompt(twin, ids)
        pairs = [
            (milliseconds(source.module, own, ids[:, :1]), milliseconds(twin, coded, ids[:, :1]))
            for _ in range(turns + 1)
        ][1:]  # the first turn makes what is made once
        row = Row(
            name, tokens, size, threads, turns, *(round(statistics.median(x), 2) for x in zip(*pairs, strict=True))
        )
        typer.echo(f"{name}, {tokens:,} tokens, {size:.1%}: {row.coded:.1f} ms beside {row.original:.1f}")
        key = (name, tokens, size, threads)
        rows = [r for r in rows if (r.model, r.tokens, r.share, r.threads) != key] + [row]
        record.write_rows(results, record.circumstances(), rows)


if __name__ == "__main__":
    app()
