"""Model cards: the README.md of every folder that deadweight writes, with all its sentences.

A card is the front matter that the Hub reads, what deadweight did, and the card of the original below it, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deadweight.save.original_card import OriginalCard, add_metadata, read_original, shown_source
from deadweight.version import __version__


class Card(Protocol):
    """What one kind of card says."""

    @property
    def source(self) -> str:
        """The original, as it was opened."""

    @property
    def title(self) -> str:
        """What was done to the original, behind its name."""

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def exact(self) -> bool:
        """Whether the model is the same function as the original."""

    def summary(self) -> list[str]:
        """Lines before the section on loading."""

    def details(self) -> list[str]:
        """Lines behind the section on loading."""


@dataclass(frozen=True)
class LawRow:
    """A law in the table of what was done."""

    law: str  # code and name
    places: int
    saved: int  # parameters that are not stored any more, or that are constants now
    sentence: str = ""  # what the law says


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
    layout: str  # slim or stock
    parameters: tuple[int, int]  # before and after
    laws: tuple[LawRow, ...]
    inputs: str | None  # what both models were compared on; None if they were not
    errors: tuple[ErrorRow, ...] = ()
    title = "reduced exactly"
    tags = ("deadweight", "exact-reduction")
    exact = True

    def summary(self) -> list[str]:
        before, after = self.parameters
        made = f"Made from `{shown_source(self.source)}` by deadweight {__version__}: the same function, with "
        if self.layout == "stock":
            saved = sum(row.saved for row in self.laws)
            return [
                f"{made}the same class and shapes. {saved:,} of {before:,} parameters are constants now "
                f"({saved / max(before, 1):.2%}): biases are zero, gains are one. The file is not smaller."
            ]
        gone = before - after
        return [f"{made}{gone:,} of {before:,} parameters gone ({gone / max(before, 1):.2%})."]

    def details(self) -> list[str]:
        return [*self.table_of_laws(), *self.table_of_errors(), "", NOT_KEPT]

    def table_of_laws(self) -> list[str]:
        """Every law with what it saves, and their sum beside what the file has lost."""
        saved, gone = sum(row.saved for row in self.laws), self.parameters[0] - self.parameters[1]
        column = "constants now" if self.layout == "stock" else "parameters saved"
        lines = [
            "",
            "## What was taken out",
            "",
            f"| law | what it says | places | {column} |",
            "| --- | --- | --- | --- |",
        ]
        lines += [f"| {row.law} | {row.sentence} | {row.places} | {row.saved:,} |" for row in self.laws]
        lines.append(f"| all | | {sum(row.places for row in self.laws)} | {saved:,} |")
        if self.layout != "stock" and saved != gone:
            lines += [
                "",
                f"The file holds {gone:,} numbers less than the original; the laws account for {saved:,}. {WHY}",
            ]
        return lines

    def table_of_errors(self) -> list[str]:
        if self.inputs is None:
            return []
        lines = ["", "## How it was checked", "", f"Against the original, on {self.inputs}. {COLUMNS}", ""]
        lines += ["| output | float64 error | own precision | noise floor |", "| --- | --- | --- | --- |"]
        return lines + [f"| {e.output} | {e.float64:.1e} | {number(e.own)} | {number(e.floor)} |" for e in self.errors]


COLUMNS = (
    "The float64 error compares the rewritten weights before they are stored; `deadweight verify` reads the stored "
    "ones, so that its float64 error contains their rounding. The noise floor is the rounding error of the original."
)
WHY = "Some redundant numbers are still stored, or were stored twice before."
NOT_KEPT = "Details: `deadweight.json`. Only what the model returns is kept the same; hidden states may differ."


@dataclass(frozen=True)
class SmallerHeadsCard:
    """The card of a model with smaller heads."""

    source: str
    cached_numbers: tuple[int, int]  # per token, before and after
    parameters: tuple[int, int]
    outcome: str  # the measured loss
    title = "with smaller heads"
    tags = ("deadweight", "smaller-heads")
    exact = False

    def summary(self) -> list[str]:
        (kv_before, kv_after), (before, after) = self.cached_numbers, self.parameters
        return [
            f"Made from `{shown_source(self.source)}` by deadweight {__version__}: {kv_after:,} of {kv_before:,} "
            f"numbers per token in the cache, {after:,} of {before:,} parameters. This "
            "is not the same function; what it costs was measured:",
            "",
            f"{self.outcome}.",
        ]

    def details(self) -> list[str]:
        return ["", "How much every head keeps: `deadweight.json`."]


@dataclass(frozen=True)
class CurveRow:
    """A size of a coded cache in the table of sizes, and what it costs."""

    share: float  # of a 16-bit cache
    predicted: float  # loss, in nats per token
    measured: str = ""  # empty: this size was not tried


@dataclass(frozen=True)
class CodedCacheCard:
    """The card of a model with a coded key-value cache."""

    source: str
    bytes_per_token: tuple[int, int]  # before and after
    tokens: int  # length of a sequence that `share` is about
    share: float  # of a 16-bit cache
    outcomes: tuple[str, ...]  # the measured loss, text by text
    curve: tuple[CurveRow, ...] = ()  # sizes beside each other
    title = "with a coded key-value cache"
    tags = ("deadweight", "kv-cache-compression")
    exact = False

    def summary(self) -> list[str]:
        before, after = self.bytes_per_token
        return [
            f"Made from `{shown_source(self.source)}` by deadweight {__version__}: {after:,} bytes of cache per token "
            f"in place of {before:,}; at {self.tokens:,} tokens {self.share:.1%} of a 16-bit cache, everything "
            "included. The weights are those of the original. This is not the same function; what it costs was "
            "measured:",
            "",
            *(f"- {outcome}" for outcome in self.outcomes),
        ]

    def details(self) -> list[str]:
        return [
            "",
            "Without this code, plain transformers loads the original model with its usual cache.",
            *self.table_of_sizes(),
            "",
            "Which coordinate of which layer has how many bits: `deadweight.json`.",
        ]

    def table_of_sizes(self) -> list[str]:
        if len(self.curve) < 2:
            return []
        rows = sorted(self.curve, key=lambda row: row.share)
        return [
            "",
            "## Size against loss",
            "",
            "The predicted loss increase, in nats per token, is that of rounding alone, from the calibration text.",
            "",
            "| share of a 16-bit cache | bits per number | predicted loss increase | measured |",
            "| --- | --- | --- | --- |",
            *(
                f"| {r.share:.1%} | {16 * r.share:.2f} | {r.predicted:.1e} | {r.measured or 'not tried'} |"
                for r in rows
            ),
        ]


def write_card(draft: Path, card: Card, folder: Path | None, loading: str, *, slim: bool) -> None:
    """Write README.md; `folder` is that of the original, whose card is kept."""
    text = card_text(card, read_original(folder), loading, custom_code=slim)
    (draft / "README.md").write_text(text, encoding="utf-8")


def card_text(card: Card, original: OriginalCard, loading: str, *, custom_code: bool = False) -> str:
    """The whole card: front matter, what was done, how to load it, and the card of the original."""
    tags = (*card.tags, *(("custom_code",) if custom_code else ()))
    front = add_metadata(original, card.source, tags, exact=card.exact)
    name = shown_source(card.source).rpartition("/")[2]
    ours = [f"# {name}, {card.title}", "", *card.summary(), *loading_section(loading), *card.details()]
    return front + "\n".join([*ours, *original_section(original)]) + "\n"


def original_section(original: OriginalCard) -> Sequence[str]:
    """The card of the original as it was, under a heading that says so."""
    if not original.body.strip():
        return ()
    kept = "What follows is the card of the original, as it was. Its numbers were measured on the original."
    return ("", "---", "", "# Card of the original", "", kept, "", original.body.strip())


def loading_section(loading: str) -> list[str]:
    """The section with the lines of Python from `how_to_load`."""
    return ["", "## Loading", "```python", loading, "```"]


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
