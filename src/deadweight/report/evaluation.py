"""An evaluation as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deadweight.evaluate.run import Evaluation
from deadweight.report.text import file_size
from deadweight.source.type_aliases import JsonObject

ROWS: tuple[tuple[str, Callable[[Evaluation], str]], ...] = (
    ("parameters", lambda e: f"{e.parameters:,}"),
    ("weights", lambda e: file_size(e.weight_bytes, 1)),
    ("perplexity per token", lambda e: f"{e.perplexity:,.3f}"),
    ("bits per byte", lambda e: f"{e.bits_per_byte:.4f}"),
    ("cache per token", lambda e: f"{e.kv_bytes_per_token:,} bytes"),
    ("tokens/s, prefill", lambda e: f"{e.tokens_per_second:,.0f}"),
    ("tokens/s, decoding", lambda e: f"{e.decoded_per_second:,.0f}"),
    ("KL from the other model", lambda e: "" if e.kl is None else f"{e.kl:.2e} nats per token"),
    ("same most likely token", lambda e: "" if e.agreement is None else f"{e.agreement:.2%} of tokens"),
)


def as_data(evaluation: Evaluation) -> JsonObject:
    return {**asdict(evaluation), "perplexity": evaluation.perplexity, "bits_per_byte": evaluation.bits_per_byte}


def print_evaluation(evaluations: Sequence[Evaluation], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column()
    for e in evaluations:
        table.add_column(Text(e.model), justify="right")
    for name, cell in ROWS:
        cells = [cell(e) for e in evaluations]
        if any(cells):
            table.add_row(name, *cells)
    console.print(table)
    console.print(f"{evaluations[0].tokens:,} tokens, {evaluations[0].bytes:,} bytes of text", highlight=False)
    for e in evaluations:
        if e.seen:
            words = f"note: {e.model} was trained on {e.seen:.0%} of this text: its loss here is not that on new text"
            console.print(f"{words}; --text FILE takes another", highlight=False, markup=False, soft_wrap=True)
