"""A report as data: a headline, facts, and sections of tables and plots. One template draws it for every command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deadweight.report.html.layers import Layers
from deadweight.report.html.page import render_page, render_part
from deadweight.report.html.plots import HeatMap, LinePlot


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()  # columns of numbers
    names: frozenset[int] = frozenset()  # columns of parameter names
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    prose: tuple[str, ...] = ()
    layers: Layers | None = None
    heat_maps: tuple[HeatMap, ...] = ()
    line_plots: tuple[LinePlot, ...] = ()
    table: Table | None = None
    command: str = ""
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        parts = (self.prose, self.layers, self.heat_maps, self.line_plots, self.table, self.command, self.notes)
        return not any(parts)


@dataclass(frozen=True)
class Report:
    kind: str  # the command
    model: str
    headline: str
    lead: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def render_report(report: Report) -> str:
    return render_page("result.html", title=f"{report.model}: {report.kind}", report=report)


def render_report_fragment(report: Report) -> str:
    return render_part("result_fragment.html", report=report)


def make_table(
    head: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    *,
    right: Sequence[str] = (),
    names: Sequence[str] = (),
    caption: str = "",
) -> Table:
    """A table by the titles of its columns; `right` and `names` are titles among them."""
    numbers, named = (frozenset(i for i, title in enumerate(head) if title in some) for some in (right, names))
    return Table(tuple(head), tuple(rows), numbers, named, caption)


def used(*sections: Section) -> tuple[Section, ...]:
    """The sections that have something to show."""
    return tuple(s for s in sections if not s.empty)
