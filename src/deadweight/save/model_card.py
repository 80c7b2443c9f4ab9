"""Model cards: the README.md of every folder that deadweight writes, with all its sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deadweight.version import __version__


@dataclass(frozen=True)
class LawRow:
    """A law in the table of what was done."""

    law: str  # code and name
    places: int
    saved: int  # parameters


@dataclass(frozen=True)
class ErrorRow:
    """An output in the table of measured errors."""

    output: str
    float64: float
    own: float | None  # in the precision of the weights
    floor: float | None  # the noise floor of the original


@dataclass(frozen=True)
class ReducedCard:
    """The card of a model from which redundant parameters were removed."""

    source: str
    parameters: tuple[int, int]  # before and after
    laws: tuple[LawRow, ...]
    inputs: str | None  # what both models were compared on; None if they were not
    errors: tuple[ErrorRow, ...] = ()

    def text(self, loading: str) -> str:
        before, after = self.parameters
        saved = before - after
        lines = [
            f"Made from `{self.source}` by deadweight {__version__}: the same function, with "
            f"{saved:,} of {before:,} parameters gone ({saved / max(before, 1):.2%}).",
            *how_to_load_section(loading),
            "",
            "## What was done",
            "",
            "| law | places | parameters saved |",
            "| --- | --- | --- |",
            *(f"| {row.law} | {row.places} | {row.saved:,} |" for row in self.laws),
        ]
        if self.inputs is not None:
            lines += ["", "## How it was checked", "", f"Against the original, on {self.inputs}.", ""]
            lines += ["| output | float64 error | own precision | noise floor |", "| --- | --- | --- | --- |"]
            lines += [f"| {e.output} | {e.float64:.1e} | {number(e.own)} | {number(e.floor)} |" for e in self.errors]
        end = "Details: `deadweight.json`. Only what the model returns is kept the same; hidden states may differ."
        return card_text(f"{short_name(self.source)}, reduced exactly", [*lines, "", end])


@dataclass(frozen=True)
class SmallerHeadsCard:
    """The card of a model with smaller heads."""

    source: str
    cached_numbers: tuple[int, int]  # per token, before and after
    parameters: tuple[int, int]
    outcome: str  # the measured loss

    def text(self, loading: str) -> str:
        (kv_before, kv_after), (before, after) = self.cached_numbers, self.parameters
        lines = [
            f"Made from `{self.source}` by deadweight {__version__}: {kv_after:,} of {kv_before:,} "
            f"numbers per token in the cache, {after:,} of {before:,} parameters. This "
            "is not the same function; what it costs was measured:",
            "",
            f"{self.outcome}.",
            *how_to_load_section(loading),
            "",
            "How much every head keeps: `deadweight.json`.",
        ]
        return card_text(f"{short_name(self.source)}, with smaller heads", lines)


@dataclass(frozen=True)
class CodedCacheCard:
    """The card of a model with a coded key-value cache."""

    source: str
    bytes_per_token: tuple[int, int]  # before and after
    tokens: int  # length of a sequence that `share` is about
    share: float  # of a 16-bit cache
    outcomes: tuple[str, ...]  # the measured loss, text by text

    def text(self, loading: str) -> str:
        before, after = self.bytes_per_token
        lines = [
            f"Made by deadweight {__version__}: {after:,} bytes of cache per token in place of {before:,}; at "
            f"{self.tokens:,} tokens {self.share:.1%} of a 16-bit cache, everything included. The weights are "
            "those of the original. This is not the same function; what it costs was measured:",
            "",
            *(f"- {outcome}" for outcome in self.outcomes),
            *how_to_load_section(loading),
            "",
            "Without this code, plain transformers loads the original model with its usual cache.",
            "",
            "Which coordinate of which layer has how many bits: `deadweight.json`.",
        ]
        return card_text(f"{short_name(self.source)}, with a coded key-value cache", lines)


def card_text(title: str, lines: Iterable[str]) -> str:
    """The header that the Hub reads, the title, and the rest."""
    return "\n".join(["---", "tags: [deadweight]", "---", f"# {title}", "", *lines]) + "\n"


def how_to_load_section(loading: str) -> list[str]:
    return ["", "## Loading", "```python", loading, "```"]


def short_name(source: str) -> str:
    return Path(source).name or source


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
