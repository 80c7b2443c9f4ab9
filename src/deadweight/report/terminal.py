"""The report for people: what is redundant, what is unknown, how complete the account is, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import IO

from rich import box
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deadweight import __version__
from deadweight.audit.finding import Audit, Completeness
from deadweight.report.groups import Doubt, Group, group_findings, group_unknown
from deadweight.report.pages import Page, pages
from deadweight.report.pattern import Pattern
from deadweight.report.text import count, one_line, percent, plural, printable

PROSE = 100  # columns after which sentences wrap
_UNBOUNDED = 10_000  # columns of a file or pipe: a table there is as wide as its longest name
_MAX_PARTNERS = 2  # patterns of partner parameters shown in one row
_STYLE = {"dead": "bold red", "folds": "yellow", "gauge": "cyan"}
_MEANING = {
    "dead": "changes nothing, whatever its value",
    "folds": "its effect moves into its neighbours",
    "gauge": "a free choice of basis or scale",
}


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that never truncates: a terminal has its own width, a file or pipe has all it needs."""
    stream = file or (sys.stderr if stderr else sys.stdout)
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_audit(audit: Audit, console: Console, *, proofs: bool = False) -> None:
    """The whole report. `proofs` adds one representative proof per row."""
    groups = group_findings(audit.findings)
    for part in _parts(audit, groups, proofs):
        console.print(part, width=None if isinstance(part, Table) else min(console.width, PROSE))


def print_page(page: Page, console: Console) -> None:
    console.print(Markdown(page.markdown, hyperlinks=False), width=min(console.width, PROSE))


def print_laws(console: Console) -> None:
    """Every law in one line."""
    table = _table("code", "law", "what it says")
    for page in pages():
        table.add_row(Text(page.code, style="bold"), page.law, page.summary)
    console.print(table, width=min(console.width, PROSE))
    console.print(Text("`deadweight explain DW002` shows one law: its proof, an example, and when it fails."))


def _parts(audit: Audit, groups: list[Group], proofs: bool) -> Iterator[RenderableType]:
    yield _heading(audit)
    if audit.untraced is not None:
        yield _untraced(audit.untraced)
    if groups:
        yield _findings_table(groups, audit.parameters)
        yield from _footnotes(groups)
    yield _totals(audit, groups)
    if proofs:
        yield from _proofs(groups)
    doubts = group_unknown(audit.unknown)
    yield from _unexplained([d for d in doubts if d.blocked_by is None])
    yield from _blocked([d for d in doubts if d.blocked_by is not None])
    if audit.completeness is not None:
        yield _completeness(audit.completeness)
    yield from (Text.assemble(("note  ", "bold"), one_line(note)) for note in audit.notes)
    yield Text.assemble(("next  ", "bold"), _advice(audit, groups))


def _heading(audit: Audit) -> Text:
    facts = [f"{count(audit.parameters)} parameters"]
    if audit.seconds:
        facts.append(f"{audit.seconds:.1f} s")
    return Text.assemble(
        ("deadweight ", "bold"), f"{__version__}  ", (one_line(audit.model), "bold cyan"), f"  {' · '.join(facts)}"
    )


def _findings_table(groups: list[Group], parameters: int) -> Table:
    table = _table("code", "law", "parameters", "verdict", "dof", "share", right=("dof", "share"))
    notes = _numbered_notes(groups)
    for verdict, rows in groupby(groups, key=lambda g: g.verdict):
        for _, of_law in groupby(rows, key=lambda g: g.code):
            for i, g in enumerate(of_law):
                label = (g.code, g.law) if i == 0 else ("", "")
                mark = f" [{notes[g.note]}]" if g.note else ""
                table.add_row(
                    Text(label[0], style="bold"),
                    Text(printable(label[1])),
                    _place(g),
                    Text.assemble((g.verdict, _STYLE[verdict]), (f" ({g.tier}){mark}", "dim")),
                    count(g.dof),
                    percent(g.dof, parameters),
                )
        table.add_section()
    return table


def _place(g: Group) -> Text:
    """The parameters of a row and, below, those that take over their effect or move along."""
    text = Text(printable(g.where), overflow="fold")
    if g.into:
        word = "with" if g.verdict == "gauge" else "into"
        text.append(f"\n  {word} {_partners(g.into)}", style="dim")
    return text


def _partners(patterns: list[Pattern]) -> str:
    shown = [printable(str(p)) for p in patterns[:_MAX_PARTNERS]]
    more = len(patterns) - len(shown)
    return ", ".join(shown) + (f", {more} more" if more else "")


def _numbered_notes(groups: list[Group]) -> dict[str, int]:
    return {note: i for i, note in enumerate(dict.fromkeys(g.note for g in groups if g.note), start=1)}


def _footnotes(groups: list[Group]) -> Iterator[Text]:
    for note, i in _numbered_notes(groups).items():
        yield Text(f"  [{i}] {one_line(note)}", style="dim")


def _totals(audit: Audit, groups: list[Group]) -> Text:
    if not groups:
        return Text("No redundant parameter found.", style="bold green")
    text = Text.assemble(
        (count(audit.redundant), "bold"),
        f" of {count(audit.parameters)} dimensions are redundant ",
        (f"({percent(audit.redundant, audit.parameters)})", "bold"),
    )
    for verdict, rows in groupby(groups, key=lambda g: g.verdict):
        dof = sum(g.dof for g in rows)
        text.append(f"\n  {count(dof):>{len(count(audit.redundant))}} ")
        text.append(f"{verdict:5}", style=_STYLE[verdict])
        text.append(f"  {_MEANING[verdict]}", style="dim")
    return text.append("\n")


def _proofs(groups: list[Group]) -> Iterator[RenderableType]:
    for g in groups:
        first = g.findings[0]
        yield Text.assemble((f"{g.code} {printable(g.law)}  ", "bold"), (printable(first.parameter), _STYLE[g.verdict]))
        steps = Table.grid(padding=(0, 1))
        steps.add_column(justify="right", style="dim")
        steps.add_column(overflow="fold")
        for i, step in enumerate(first.proof, start=1):
            steps.add_row(str(i), Text(printable(step)))
        if not first.proof:
            steps.add_row("", Text("no proof: measured only", style="dim"))
        if g.evidence is not None:
            steps.add_row("", Text(f"measured: moves the output by {g.evidence:.1e} of a live direction", style="dim"))
        if (others := len(g.findings) - 1) > 0:
            steps.add_row("", Text(f"and likewise {others} more in {printable(g.where)}", style="dim"))
        yield Padding(steps, (0, 0, 1, 2))


def _unexplained(doubts: list[Doubt]) -> Iterator[RenderableType]:
    if not doubts:
        return
    lines = Text()
    for d in doubts:
        lines.append(printable(str(d.pattern)), style="bold").append(f"  {one_line(d.why)}\n")
    lines.append("Measured as having no effect, and no law says why. Do not remove these on this evidence alone.")
    yield Panel(lines, title="UNEXPLAINED", title_align="left", border_style="bold magenta", box=box.HEAVY)


def _blocked(doubts: list[Doubt]) -> Iterator[RenderableType]:
    if not doubts:
        return
    yield Text.assemble(("Not proved, so kept", "bold"), (": an op stands between the parameter and a law", "dim"))
    table = _table("parameters", "blocked by", "why")
    for d in doubts:
        table.add_row(
            Text(printable(str(d.pattern)), overflow="fold"),
            Text(printable(d.blocked_by or ""), style="yellow", overflow="fold"),
            Text(one_line(d.why)),
        )
    yield table


def _untraced(reason: str) -> Panel:
    text = Text.assemble(
        "torch.export could not trace this model, so nothing here is proved: what follows was only measured.\n",
        ("reason: ", "bold"),
        one_line(reason),
    )
    return Panel(text, title="EVIDENCE ONLY", title_align="left", border_style="bold yellow", box=box.HEAVY)


def _completeness(c: Completeness) -> Text:
    missing = c.measured - c.explained
    style, verdict = ("bold green", "complete") if missing == 0 else ("bold yellow", f"{count(missing)} not explained")
    text = Text.assemble(
        f"The laws explain {count(c.explained)} of {count(c.measured)} redundant dimensions measured: ",
        (verdict, style),
    )
    if c.clone:
        text.append(f"\n  measured on {one_line(c.clone)}", style="dim")
        text.append(f", {count(c.parameters)} parameters" if c.parameters else "", style="dim")
    if c.by_law:
        text.append("\n  " + " + ".join(f"{count(n)} {printable(law)}" for law, n in c.by_law), style="dim")
    if c.unsound:
        text.append(f"\nUNSOUND: {plural(c.unsound, 'claimed direction')} moved the output. ", style="bold red")
        text.append("That is a bug in deadweight: please report it with this model's config.")
    return text.append("\n")


def _advice(audit: Audit, groups: list[Group]) -> str:
    """One line on what to do first: the removable law with most dof, then the others, then the doubts."""
    if audit.untraced is not None:
        return "pass example inputs that torch.export can trace, or a smaller forward, to turn evidence into proof."
    if not groups:
        return "nothing to remove. `deadweight explain` lists the laws that were tried."
    first = groups[0]
    remedy = next((p.remedy for p in pages() if p.code == first.code), "")
    return f"{first.code} {printable(first.law)}: {remedy} See `deadweight explain {first.code}`."


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False, padding=(0, 1))
    for name in columns:
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in ("code", "law", *right))
    return table
