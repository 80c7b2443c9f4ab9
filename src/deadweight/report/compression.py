"""A compression, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.deadweight_json import cache_data, heads_data
from deadweight.compress.result import Compression, outcome
from deadweight.errors import DeadweightError
from deadweight.report.cache import plot_cache, print_cache


def as_data(result: Compression | CacheCompression) -> dict[str, Any]:
    """Everything as plain data, for --json."""
    return cache_data(result) if isinstance(result, CacheCompression) else heads_data(result)


def print_compression(result: Compression | CacheCompression, console: Console) -> None:
    if isinstance(result, CacheCompression):
        print_cache(result, console)
    else:
        print_heads(result, console)


def plot_compression(result: Compression | CacheCompression, file: Path) -> None:
    if not isinstance(result, CacheCompression):
        raise DeadweightError("found --plot; only a coded cache has a picture: leave it out")
    plot_cache(result, file)


def print_heads(result: Compression, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    for name in ("key dimensions kept", "of", "value dimensions kept", "of"):
        table.add_column(name, justify="right")
    for path, kept in result.kept.items():
        d_key, d_value = result.head_sizes[path]
        table.add_row(Text(path), spread(kept.keys), f"{d_key:,}", spread(kept.values), f"{d_value:,}")
    console.print(table)
    console.print("per head; one number where all heads keep the same", style="dim", highlight=False)
    console.print(
        f"\ncache {result.kv_before:,} → {result.kv_after:,} numbers per token "
        f"({result.kv_after / result.kv_before:.1%})   parameters {result.parameters_before:,} → "
        f"{result.parameters_after:,} ({result.parameters_after / result.parameters_before - 1:+.1%})",
        highlight=False,
    )
    if result.judgement_before_healing is not None:
        console.print(f"before healing: {outcome(result.judgement_before_healing)}", highlight=False)
    console.print(outcome(result.judgement), highlight=False)
    for path, why in list(result.left_alone.items())[:3]:
        console.print(f"left alone in {path}: {why}", highlight=False, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def spread(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}" if len(set(sizes)) == 1 else " ".join(map(str, sizes))
