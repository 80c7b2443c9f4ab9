"""How often a model finds a sentence that was planted in a long text, with its own cache and with a coded one.

python benchmarks/cache_retrieval.py run MODEL --text TEXT.txt
python benchmarks/cache_retrieval.py report

A sentence says the code of a city, five digits. It stands at a random place of 8,000 tokens of the text, and the prompt
ends with the beginning of the same sentence. The answer is found if every digit is the most likely next token. The
coded cache is read as in generation: the prompt is coded, then digits are decoded one by one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from deadweight.compress.code_cache import measure_model
from deadweight.compress.coded_model import allocate, with_coded_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import Settings
from deadweight.progress import silent
from deadweight.report import record

RESULTS = Path(__file__).parent / "results" / "cache_retrieval.json"
CITIES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Quebec", "Dublin", "Cairo", "Perth", "Kyoto")
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Row:
    """One model and cache: prompts in which every digit was the most likely one, and how likely the answers were."""

    model: str
    cache: str
    share: float
    tokens: int
    prompts: int
    found: int
    nats_per_digit: float


@dataclass(frozen=True)
class Prompt:
    before: Tensor
    answer: Tensor


def prompts_of(tokenizer: Any, text: str, tokens: int, count: int) -> list[Prompt]:
    """The same for every model with this tokenizer."""
    draw = random.Random(0)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompts = []
    for i in range(count):
        city, code = CITIES[i % len(CITIES)], f"{draw.randrange(10**5):05d}"
        planted = tokenizer(f"\nThe secret code of {city} is {code}.\n", add_special_tokens=False)["input_ids"]
        question = tokenizer(f"\nThe secret code of {city} is", add_special_tokens=False)["input_ids"]
        answer = tokenizer(f" {code}", add_special_tokens=False)["input_ids"]
        room = tokens - len(planted) - len(question)
        start = draw.randrange(len(ids) - room)
        at = draw.randrange(room)
        filler = ids[start : start + room]
        prompts.append(Prompt(torch.tensor([*filler[:at], *planted, *filler[at:], *question]), torch.tensor(answer)))
    return prompts


@torch.no_grad()
def answered(model: Any, prompt: Prompt, device: torch.device) -> tuple[bool, float]:
    """Whether every token of the answer is the most likely one, and its nats per token."""
    cache = DynamicCache(config=model.config)
    given = prompt.before[None].to(device)
    logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    right, nats = True, 0.0
    for token in prompt.answer.tolist():
        right = right and int(logits.argmax()) == token
        nats -= float(logits.float().log_softmax(-1)[token])
        logits = model(torch.tensor([[token]], device=device), past_key_values=cache, use_cache=True).logits[0, -1]
    return right, nats / len(prompt.answer)


@app.command()
def run(
    model: str,
    text: Annotated[Path, typer.Option(help="Text between which the sentence is planted.")],
    name: Annotated[str, typer.Option(help="The model's name in the record.")] = "SmolLM2-135M",
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 8000,
    prompts: int = 60,
    share: Annotated[list[float], typer.Option(help="Sizes of our cache, several times.")] = [0.25, 0.125],  # noqa: B006
    results: Path = RESULTS,
) -> None:
    source, precision = open_streamed(model, None)
    job = CompressionJob(source, model, None, Settings(length=1024), precision, silent)
    work = measure_model(job)
    asked = prompts_of(AutoTokenizer.from_pretrained(model), text.read_text(encoding="utf-8"), tokens, prompts)
    device = work.calibration.measure[0]["input_ids"].device
    caches = {("its own", 1.0): source.module}
    for size in share:
        plan = allocate(work.options, size, tokens)
        caches["coded", round(plan.share, 4)] = with_coded_cache(source.module, plan, work.precision)[0]
    rows = []
    for (kind, size), module in caches.items():
        answers = [answered(module, prompt, device) for prompt in asked]
        found, nats = sum(right for right, _ in answers), sum(n for _, n in answers) / len(answers)
        rows.append(Row(name, kind, size, tokens, prompts, found, round(nats, 4)))
        record.write_rows(results, record.circumstances() | {"text": text.name}, rows)
        typer.echo(f"{name}, cache {kind}, {size:.1%}: {found} of {prompts}, {nats:.3f} nats per digit")


@app.command()
def report(results: Path = RESULTS) -> None:
    """The table of a record."""
    typer.echo("\n".join(table(record.read_rows(results)[1])))


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| model | cache | bytes | prompts | found | nats per digit |", "| --- " * 6 + "|"]
    return lines + [
        f"| {r['model']} | {r['cache']} | {r['share']:.1%} | {r['prompts']} of {r['tokens']:,} tokens | {r['found']} | "
        f"{r['nats_per_digit']:.3f} |"
        for r in rows
    ]


if __name__ == "__main__":
    app()
