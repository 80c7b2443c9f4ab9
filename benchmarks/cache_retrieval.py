"""How often a model finds sentences that were planted in a long text, with its own cache and with a coded one.

python benchmarks/cache_retrieval.py run MODEL --text TEXT.txt
python benchmarks/cache_retrieval.py report

Every sentence says the code of another city, five digits; they stand at random places of 8,000 tokens of the text. The
text is read once. Then, for every city, one more call reads the beginning of its sentence and the digits: they are
found if each is the most likely next token. That call reads the text from the cache, so from codes alone if it is
coded; its own tokens are exact, as always. Reading the text in one call is exact with codes too, so the keys and values
of one reading are given to every cache.

What was asked is written after every text, and is not asked again when the script is started again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cache_measured import measured
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from deadweight.compress.coded_model import allocate, with_coded_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import Settings
from deadweight.progress import silent
from deadweight.report import record
from deadweight.slim.cache import CodedCache
from deadweight.slim.coder import Coder

RESULTS = Path(__file__).parent / "results" / "cache_retrieval.json"
CITIES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Quebec", "Dublin", "Cairo", "Perth", "Kyoto")
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Row:
    """One model and cache: questions of which every digit was the most likely one, and how likely the digits were."""

    model: str
    cache: str
    share: float
    tokens: int  # of a text
    planted: int  # sentences in it
    texts: int = 0  # that were read
    found: int = 0
    nats: float = 0.0  # the sum over all questions of the mean over the digits

    @property
    def key(self) -> tuple[str, str, float, int, int]:
        return self.model, self.cache, self.share, self.tokens, self.planted

    def plus(self, answers: list[tuple[bool, float]]) -> Row:
        found, nats = sum(right for right, _ in answers), sum(n for _, n in answers)
        return replace(self, texts=self.texts + 1, found=self.found + found, nats=round(self.nats + nats, 4))


@dataclass(frozen=True)
class Planted:
    """The tokens of a text, and questions about it with their answers."""

    text: Tensor
    questions: tuple[tuple[list[int], list[int]], ...]


def planted_text(encode: Callable[[str], list[int]], ids: list[int], tokens: int, planted: int, number: int) -> Planted:
    """Text `number`: the same for every model with this tokenizer."""
    draw = random.Random(number)
    codes = {city: f"{draw.randrange(10**5):05d}" for city in draw.sample(CITIES, planted)}
    said = [encode(f"\nThe secret code of {city} is {code}.\n") for city, code in codes.items()]
    room = tokens - sum(map(len, said))
    start = draw.randrange(len(ids) - room)
    places = sorted(draw.randrange(room) for _ in said)
    text, last = [], 0
    for at, sentence in zip(places, said, strict=True):
        text += [*ids[start + last : start + at], *sentence]
        last = at
    text += ids[start + last : start + room]
    asked = tuple((encode(f"\nThe secret code of {city} is"), encode(f" {code}")) for city, code in codes.items())
    return Planted(torch.tensor(text), asked)


@torch.no_grad()
def read_text(original: Any, text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all layers."""
    cache = DynamicCache(config=original.config)
    original(text[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def filled(model: Any, states: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache of this model, coded if the model has coders, that has taken these keys and values."""
    cache = DynamicCache(config=model.config)
    coders = [part for part in model.modules() if isinstance(part, Coder)]
    for i, (key, value) in enumerate(states):
        (CodedCache(cache, coders[i]) if coders else cache).update(key, value, i)
    return cache


@torch.no_grad()
def answered(model: Any, cache: DynamicCache, question: list[int], answer: list[int]) -> tuple[bool, float]:
    """Whether every token of the answer is the most likely one, and its nats per token; the cache is as before."""
    given = torch.tensor([question + answer[:-1]], device=next(model.parameters()).device)
    logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=len(answer)).logits[0].float()
    cache.crop(-given.shape[1])
    right = torch.tensor(answer, device=logits.device)
    nats = -logits.log_softmax(-1).gather(1, right[:, None]).mean()
    return bool((logits.argmax(-1) == right).all()), float(nats)


@app.command()
def run(
    model: str,
    text: Annotated[Path, typer.Option(help="Text in which the sentences are planted.")],
    name: Annotated[str, typer.Option(help="The model's name in the record.")] = "SmolLM2-135M",
    tokens: Annotated[int, typer.Option(help="Of a text.")] = 8000,
    planted: Annotated[int, typer.Option(help="Sentences in a text, ten at most.")] = 10,
    texts: Annotated[int, typer.Option(help="Texts that are read.")] = 6,
    share: Annotated[list[float], typer.Option(help="Sizes of our cache, several times.")] = [0.25, 0.125],  # noqa: B006
    kept: Annotated[Path | None, typer.Option(help="Measurements: read from here, or written there.")] = None,
    results: Path = RESULTS,
) -> None:
    source, precision = open_streamed(model, None)
    work = measured(CompressionJob(source, model, None, Settings(length=1024), precision, silent), kept)
    device = work.calibration.measure[0]["input_ids"].device
    modules = {Row(name, "its own", 1.0, tokens, planted): source.module}
    for size in share:
        plan = allocate(work.options, size, tokens)
        row = Row(name, "coded", round(plan.share, 4), tokens, planted)
        modules[row] = with_coded_cache(source.module, plan, work.precision)[0]
    rows = {row.key: row for row in (Row(**r) for r in record.read_rows(results)[1])}
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    ids = encode(text.read_text(encoding="utf-8"))
    for number in range(texts):
        due = {r.key: module for r, module in modules.items() if rows.get(r.key, r).texts <= number}
        if not due:
            continue
        asked = planted_text(encode, ids, tokens, planted, number)
        states = read_text(source.module, asked.text.to(device))
        fresh = {row.key: row for row in modules}
        for key, module in due.items():
            cache = filled(module, states)
            rows[key] = rows.get(key, fresh[key]).plus([answered(module, cache, *q) for q in asked.questions])
        record.write_rows(results, record.circumstances() | {"text": text.name}, rows.values())
        typer.echo("\n".join(table([vars(rows[key]) for key in due])), err=True)


@app.command()
def report(results: Path = RESULTS) -> None:
    """The table of a record."""
    typer.echo("\n".join(table(record.read_rows(results)[1])))


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| model | cache | bytes | questions | found | nats per digit |", "| --- " * 6 + "|"]
    return lines + [
        f"| {r['model']} | {r['cache']} | {r['share']:.1%} | {r['texts'] * r['planted']} in {r['texts']} texts of "
        f"{r['tokens']:,} tokens | {r['found']} | {r['nats'] / max(1, r['texts'] * r['planted']):.3f} |"
        for r in rows
    ]


if __name__ == "__main__":
    app()
