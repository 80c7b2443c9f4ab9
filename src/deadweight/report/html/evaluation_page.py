"""The page of an evaluation: one model, or two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from deadweight.evaluate.run import Evaluation
from deadweight.report.evaluation import ROWS
from deadweight.report.html.page import change_text
from deadweight.report.html.report import Report, Section, make_table

MEANING = (
    "Perplexity is e to the mean loss per token, lower is better; bits per byte do not depend on the tokenizer. Speed "
    "was measured once on this machine, so small differences mean nothing. The cache is what keys and values of one "
    "token take."
)


def describe_evaluation(evaluations: Sequence[Evaluation]) -> Report:
    last = evaluations[-1]
    names = [f"model {i}: {e.model}" if len(evaluations) > 1 else e.model for i, e in enumerate(evaluations, 1)]
    rows = [(name, *cells) for name, cell in ROWS if any(cells := [cell(e) for e in evaluations])]
    table = make_table(["", *names], rows, right=names)
    facts = (
        ("tokens predicted", f"{last.tokens:,}"),
        ("bytes of text", f"{last.bytes:,}"),
        ("bits per byte", f"{last.bits_per_byte:.4f}"),
        ("cache per token", f"{last.kv_bytes_per_token:,} bytes"),
    )
    section = Section(title="Side by side" if len(evaluations) > 1 else "Measured", prose=(MEANING,), table=table)
    return Report("evaluate", last.model, headline(evaluations), lead(evaluations), facts, (section,))


def headline(evaluations: Sequence[Evaluation]) -> str:
    first, last = evaluations[0], evaluations[-1]
    if len(evaluations) == 1:
        return f"Perplexity {last.perplexity:,.2f}"
    change = last.perplexity / first.perplexity - 1
    return f"Perplexity {first.perplexity:,.2f} → {last.perplexity:,.2f} ({change_text(change)})"


def lead(evaluations: Sequence[Evaluation]) -> str:
    last = evaluations[-1]
    if last.kl is None or last.agreement is None:
        return f"on {last.tokens:,} tokens, {last.bits_per_byte:.4f} bits per byte."
    return (
        f"Compared with {evaluations[0].model}: the Kullback-Leibler divergence is {last.kl:.2e} nats per token, and "
        f"both have the same most likely token for {last.agreement:.2%} of the tokens."
    )
