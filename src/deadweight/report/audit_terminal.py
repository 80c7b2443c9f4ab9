"""The audit report in the terminal: what is redundant, what is unknown, the account, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, TypeGuard

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as RichGroup
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deadweight.audit.result import Audit, Completeness, SourceLine, sum_payoffs
from deadweight.laws.page import Page, pages
from deadweight.report.advice import DOF, PROOF_WORDS, savings, worth_of
from deadweight.report.audit_rows import Doubt, Group, group_findings, group_unknown
from deadweight.report.name_pattern import Pattern, pieces_text
from deadweight.report.text import count, one_line, percent, plural, printable, wrap_name
from deadweight.version import __version__

PROSE = 100  # columns after which sentences wrap
_UNBOUNDED = 10_000  # columns of a file or pipe: a table there is as wide as its longest name
_MAX_LINES = 8  # lines of code named for one fix
_MAX_PARTNERS = 2  # patterns of partner parameters shown in one row
_SHORTEST_NAME = 24  # columns below which a name is not squeezed
_BAR = 24  # columns of the longest bar
_STYLE = {"dead": "bold red", "folds": "yellow", "gauge": "cyan"}
_MEANING = {
    "dead": "changing it changes nothing",
    "folds": "other parameters can take over its effect",
    "gauge": "a free choice of basis or scale",
}


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that never truncates: a terminal has its own width, a file or pipe is as wide as needed."""
    stream = file or (sys.stderr if stderr else sys.stdout)
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_audit(audit: Audit, console: Console, *, proofs: bool = False) -> None:
    """The whole report. `proofs` adds one representative proof per row."""
    prose = min(console.width, PROSE)
    for part in _parts(audit, console, proofs):
        console.print(part, width=None if isinstance(part, Table) and part.columns[0].header else prose)
        console.print()


def print_page(page: Page, console: Console) -> None:
    console.print(Markdown(page.markdown, hyperlinks=False), width=min(console.width, PROSE))


def print_laws(console: Console) -> None:
    """Every law in one line."""
    table = _table("code", "law", "what it says")
    for page in pages():
        table.add_row(Text(page.code, style="bold"), page.law, page.summary)
    console.print(table, width=min(console.width, PROSE))
    console.print(Text("\n`deadweight explain DW002` shows one law: its proof, an example, and when it fails."))


def _parts(audit: Audit, console: Console, proofs: bool) -> Iterator[RenderableType]:
    groups = group_findings(audit.findings)
    yield _heading(audit)
    if audit.untraced is not None:
        yield _untraced_panel(audit.untraced)
    if groups:
        wide = _findings_table(groups, audit.parameters)
        natural = console.measure(wide, options=console.options.update(max_width=_UNBOUNDED)).maximum
        yield wide if natural <= console.width else _findings_table(groups, audit.parameters, narrow=True)
        yield from _footnotes(groups)
        yield _fixes_table(groups)
    yield _totals(audit, groups, "#" if console.options.ascii_only else "█")
    if proofs and groups:
        text = " ".join(step for g in groups for step in g.findings[0].proof)
        words = [(word, meaning) for word, meaning in PROOF_WORDS if f"→ {word}" in text]
        yield _labelled_grid(words, style="dim")
        yield from (_proof(g) for g in groups)
    doubts = group_unknown(audit.unknown)
    yield from _unexplained_panel([d for d in doubts if d.blocked_by is None])
    yield from _blocked_table([d for d in doubts if d.blocked_by is not None])
    if audit.completeness is not None:
        yield _completeness(audit.completeness)
    notes = [("note", one_line(note)) for note in audit.notes]
    yield _labelled_grid([*notes, *worth_of(audit), ("next", _advice(audit, groups))])


def _heading(audit: Audit) -> Text:
    took = f" · {audit.seconds:.1f} s" if audit.seconds else ""
    facts = f"{plural(audit.parameters, 'parameter')}{took}"
    return Text.assemble((one_line(audit.model), "bold cyan"), f"  {facts}  ", (f"deadweight {__version__}", "dim"))


def _findings_table(groups: list[Group], parameters: int, *, narrow: bool = False) -> Table:
    """One row per group. In a narrow table the law is a line above its rows instead of two columns."""
    columns = ("parameters", "verdict", "dof", "share")
    table = _table(*columns if narrow else ("code", "law", *columns), right=("dof", "share"))
    notes = _numbered_notes(groups)
    for _, of_verdict in groupby(groups, key=lambda g: g.verdict):
        for _, of_law in groupby(of_verdict, key=lambda g: g.code):
            for i, g in enumerate(of_law):
                label = [Text(g.code, style="bold"), Text(printable(g.law))] if i == 0 else [Text(), Text()]
                if narrow and i == 0:
                    table.add_row(Text(" ").join(label))
                mark = f" [{notes[g.note]}]" if g.note else ""
                verdict = Text.assemble((g.verdict, _STYLE[g.verdict]), (f" ({g.tier}){mark}", "dim"))
                numbers = count(g.dof), percent(g.dof, parameters)
                table.add_row(*[] if narrow else label, _place(g, narrow), verdict, *numbers)
        table.add_section()
    return table


def _place(g: Group, narrow: bool) -> RenderableType:
    """The parameters of a row and, below, those that take over their effect or move along."""
    lines = [_Name(g.where)]
    if g.into:
        word = "with" if g.verdict == "gauge" else "into"
        lines.extend(_Name(f"  {word if i == 0 else '    '} {p}", "dim") for i, p in enumerate(_partners(g.into)))
    return Padding(RichGroup(*lines), (0, 0, 0, 2)) if narrow else RichGroup(*lines)


@dataclass(frozen=True)
class _Name:
    """A parameter name that breaks at its dots where it has to break."""

    name: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from (Text(line, self.style, no_wrap=True) for line in wrap_name(printable(self.name), options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(printable(self.name))
        return Measurement(min(width, _SHORTEST_NAME), width).with_maximum(options.max_width)


def _partners(patterns: list[Pattern]) -> list[str]:
    shown = [str(p) for p in patterns[:_MAX_PARTNERS]]
    more = len(patterns) - len(shown)
    return [*shown, f"and {more} more"] if more else shown


def _numbered_notes(groups: list[Group]) -> dict[str, int]:
    return {note: i for i, note in enumerate(dict.fromkeys(g.note for g in groups if g.note), start=1)}


def _footnotes(groups: list[Group]) -> Iterator[RenderableType]:
    if notes := _numbered_notes(groups):
        yield _labelled_grid([(f"[{i}]", one_line(note)) for note, i in notes.items()], style="dim")


def _fixes_table(groups: list[Group]) -> Table:
    """One row per law and verdict: what to write in the model's code, where, and what that saves."""
    table = _table("code", "verdict", "fix", "saves")
    for (verdict, code), of_law in groupby(groups, key=lambda g: (g.verdict, g.code)):
        alike = list(of_law)
        saves = savings(sum_payoffs(f for g in alike for f in g.findings))
        fix = Text(one_line(alike[0].fix))
        if verdict != "gauge" and (places := _source_lines(alike)):
            fix.append(f"\nat {places}", style="dim")
        table.add_row(Text(code, "bold"), Text(verdict, _STYLE[verdict]), fix, Text(saves, "dim"))
    return table


def _source_lines(groups: list[Group]) -> str:
    """The lines of the user's own code that build these parameters: file.py:3, 5, other.py:7."""
    places = dict.fromkeys((f.source.path, f.source.line) for g in groups for f in g.findings if is_own(f.source))
    shown = sorted(places)[:_MAX_LINES]
    by_file = groupby(shown, key=lambda place: place[0])
    words = [f"{printable(file)}:{', '.join(str(line) for _, line in lines)}" for file, lines in by_file]
    return ", ".join(words) + (f" and {len(places) - len(shown)} more" if len(places) > len(shown) else "")


def is_own(source: SourceLine | None) -> TypeGuard[SourceLine]:
    """Whether a line belongs to the project in the working directory, and not to an environment inside it."""
    return source is not None and not Path(source.path).is_absolute() and "site-packages" not in source.path


def _totals(audit: Audit, groups: list[Group], block: str) -> RenderableType:
    if not groups and audit.unaudited is not None:
        what = "Nothing is proved" if audit.untraced else "Nothing is proved and nothing could be measured"
        return Text(f"{what}: this model was not audited.", style="bold red")
    if not groups:
        return Text("No redundant parameter found.", style="bold")
    headline = Text.assemble(
        (count(audit.redundant), "bold"),
        f" of {count(audit.parameters)} dimensions are redundant: ",
        (percent(audit.redundant, audit.parameters), "bold"),
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(justify="right")
    for verdict, of_verdict in groupby(groups, key=lambda g: g.verdict):
        dof, style = sum(g.dof for g in of_verdict), _STYLE[verdict]
        bar = block * max(1, round(_BAR * dof / max(1, audit.redundant)))
        rows.add_row(count(dof), Text(verdict, style), Text(_MEANING[verdict], "dim"), Text(bar, style))
    return RichGroup(headline, Padding(rows, (0, 0, 0, 2)), Text(DOF, "dim"))


def _proof(g: Group) -> RenderableType:
    """The proof of the first finding of a group; the others differ in the layer only."""
    first = g.findings[0]
    name = printable(first.parameter + pieces_text(first.slice))
    where = f"  {first.source.role} at {first.source}" if first.source is not None else ""
    steps = [(str(i), printable(step)) for i, step in enumerate(first.proof, start=1)]
    asides = [] if steps else ["no proof, only measured"]
    if g.evidence is not None:
        asides.append(
            f"measured: changes the output {g.evidence:.1e} times as much as a random change of all parameters"
        )
    if first.unreplayed:
        asides.append(
            f"not replayed by the checker: {plural(first.unreplayed, 'step')} on values with too many elements"
        )
    if len(g.findings) > 1:
        asides.append(f"likewise for all {count(len(g.findings))} findings in {printable(g.where)}")
    return RichGroup(
        Text.assemble((f"{g.code} {printable(g.law)}  ", "bold"), (name, _STYLE[g.verdict]), (printable(where), "dim")),
        Padding(_labelled_grid(steps), (0, 0, 0, 2)),
        *(Padding(Text(aside, style="dim"), (0, 0, 0, 2)) for aside in asides),
    )


def _unexplained_panel(doubts: list[Doubt]) -> Iterator[RenderableType]:
    if not doubts:
        return
    lines = Text()
    for d in doubts:
        lines.append(printable(str(d.pattern)), style="bold").append(f"  {one_line(d.why)}\n")
    lines.append("Measured to have no effect, but no law says why. Do not remove these on this evidence alone.")
    yield Panel(lines, title="UNEXPLAINED", title_align="left", border_style="bold magenta", box=box.HEAVY)


def _blocked_table(doubts: list[Doubt]) -> Iterator[RenderableType]:
    if not doubts:
        return
    yield Text.assemble(("Not proved, so kept", "bold"), (": an operation blocks the proof", "dim"))
    table = _table("parameters", "blocked by", "why")
    for d in doubts:
        table.add_row(
            _Name(str(d.pattern)),
            Text(printable(d.blocked_by or ""), style="yellow", overflow="fold"),
            Text(one_line(d.why)),
        )
    yield table


def _untraced_panel(reason: str) -> Panel:
    text = Text.assemble(
        "torch.export could not trace this model, so nothing is proved: the following was only measured.\n",
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
        text.append(f"\n  measured on {one_line(c.measured_on)}", style="dim")
    if c.by_law:
        text.append("\n  " + " + ".join(f"{count(n)} {printable(law)}" for law, n in c.by_law), style="dim")
    if c.unsound:
        text.append(f"\nUNSOUND: {plural(c.unsound, 'claimed direction')} changed the output. ", style="bold red")
        text.append("That is a bug in deadweight: please report it with this model's config.")
    return text


def _advice(audit: Audit, groups: list[Group]) -> str:
    """What to do first: the remedy of a law whose parameters can simply be left out, else of the first row."""
    if audit.untraced is not None:
        return "change the code that the reason names, or pass other inputs: a model that can be traced gets proofs."
    if not groups and audit.unaudited is not None:
        return "pass inputs on which the model runs, or a smaller version of the model: see the notes above."
    if not groups:
        return "nothing to remove by the laws that were tried. `deadweight explain` lists all laws."
    first = next((g for code in avoidable_laws() for g in groups if g.code == code), groups[0])
    remedy = next((p.remedy for p in pages() if p.code == first.code), "")
    return f"{first.code} {printable(first.law)}: {remedy} See `deadweight explain {first.code}`."


def avoidable_laws() -> list[str]:
    """The laws whose parameters can be avoided by a flag or one line of code, in the order of the search."""
    from deadweight.laws.catalogue import every_law  # imports torch, which the list of laws does not need

    return list(dict.fromkeys(law.title.code for law, _ in every_law().in_search_order() if law.avoidable))


def _labelled_grid(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Short labels on the left, sentences that wrap beside them."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style=style or "bold")
    grid.add_column(overflow="fold", style=style)
    for label, sentence in rows:
        grid.add_row(Text(label), Text(sentence))
    return grid


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=name in ("code", "law", "verdict", *right),
            max_width=PROSE - 20 if name in ("why", "fix") else None,
        )
    return table
