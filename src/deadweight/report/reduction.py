"""What a reduction did, and how two models compare: for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from deadweight.reduce.result import Reduction, Step
from deadweight.reduce.verify import FLOORS, Verification
from deadweight.report.pattern import collapse
from deadweight.report.terminal import PROSE
from deadweight.report.text import count, one_line, percent, plural, printable
from deadweight.version import __version__


def print_reduction(found: Reduction, console: Console) -> None:
    """The steps by law, what is left out and why, what was saved, how it was checked, how to load it."""
    for part in _parts(found):
        console.print(part, width=None if isinstance(part, Table) else min(console.width, PROSE))
        console.print()


def print_verification(found: Verification, console: Console) -> None:
    console.print(_checked(found))
    console.print()
    if found.same:
        console.print(Text("same function, to the precision in which the weights are stored", style="bold green"))
    else:
        worst = found.worst
        grows = f"; rounding in its own precision grows by {worst.noise.growth:.1f}" if worst.noise else ""
        console.print(
            Text(f"different: {worst.output} is off by {worst.float64:.1e} in float64{grows}", style="bold red")
        )


def _parts(found: Reduction) -> Iterator[RenderableType]:
    took = f"  {found.seconds:.1f} s" if found.seconds else ""
    layout = f"  layout {found.layout}"
    yield Text.assemble((one_line(found.model), "bold cyan"), layout, took, (f"  deadweight {__version__}", "dim"))
    if found.steps:
        yield _steps(found)
    if found.skipped:
        yield _skipped(found)
    yield _totals(found)
    if found.verification is not None:
        yield _checked(found.verification)
    for note in found.notes:
        yield Text(f"note  {one_line(note)}", style="dim")
    yield _next(found)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _steps(found: Reduction) -> Table:
    word = "saves" if found.layout == "slim" else "constant now"
    table = _table("code", "law", "parameters", "tier", word, right=(word,))
    by_law: dict[tuple[str, str, str], list[Step]] = defaultdict(list)
    for step in found.steps:
        by_law[step.code, step.law, step.tier].append(step)
    for (code, law, tier), steps in by_law.items():
        for i, pattern in enumerate(collapse(s.parameter for s in steps)):
            mine = [s for s in steps if s.parameter in pattern]
            label = (Text(code, style="bold"), Text(law)) if i == 0 else (Text(), Text())
            table.add_row(*label, printable(str(pattern)), tier if i == 0 else "", count(sum(s.saves for s in mine)))
    return table


def _skipped(found: Reduction) -> Table:
    table = _table("not done", "parameters", "because")
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for s in found.skipped:
        by_reason[f"{s.code} {s.law}", s.why].append(s.parameter)
    for (law, why), names in by_reason.items():
        patterns = collapse(names)
        shown = printable(str(patterns[0])) + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else "")
        table.add_row(Text(law, style="dim"), Text(shown, style="dim"), Text(one_line(why), style="dim"))
    return table


def _totals(found: Reduction) -> Text:
    gone = found.parameters_before - found.parameters_after
    words = f"{plural(found.parameters_before, 'parameter')} → {found.parameters_after:,}"
    words += f"  ({gone:,} gone, {percent(gone, found.parameters_before)})" if gone else "  (the same shapes: stock)"
    if found.bytes_after:
        words += f"   {found.bytes_before / 1e6:,.2f} MB → {found.bytes_after / 1e6:,.2f} MB"
    if found.flops_saved:
        words += f"   {found.flops_saved:,} FLOPs less per token"
    return Text(words, style="bold")


def _checked(found: Verification) -> Table:
    table = _table(
        "output",
        "error in float64",
        "in own precision",
        "noise floor",
        "rounding grows",
        right=("error in float64", "in own precision", "noise floor", "rounding grows"),
    )
    for e in found.errors:
        grows = "" if e.noise is None else f"× {e.noise.growth:.2f}"
        style = "green" if e.same else "bold red"
        own, floor = ("not measured" if v is None else f"{v:.1e}" for v in (e.own, e.floor))
        table.add_row(printable(e.output), Text(f"{e.float64:.1e}", style=style), own, floor, grows)
    table.caption = f"on {found.inputs}; rounding (simulated) may grow by {FLOORS:g}" if found.inputs else None
    table.caption_justify = "left"
    return table


def _next(found: Reduction) -> Text:
    if found.out is None and found.module is None:
        return Text("nothing was written: this is the plan")
    if found.out is None:
        return Text("the reduced module is in the result's `module`")
    return Text(f"written to {printable(str(found.out))}; its README.md says how to load it")
