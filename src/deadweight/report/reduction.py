"""The report of a reduction, and of a comparison of two models, in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from deadweight.reduce.error_limits import FLOORS, Error, Verification
from deadweight.reduce.result import AppliedRewrite, Reduction
from deadweight.report.audit_terminal import PROSE
from deadweight.report.name_pattern import collapse
from deadweight.report.text import count, file_size, one_line, percent, plural, printable
from deadweight.version import __version__

MEANING = (
    "error: relative to the size of the output. noise floor: the error of the original in its own precision.",
    "rounding grows: the reduced model's rounding errors, as a multiple of the original's.",
)
BEFORE_STORING = "in float64: before the weights are stored; `deadweight verify` reads them as stored, and so rounded."
STORED = "in float64: of the weights as stored. `reduce` shows a smaller error: it measures before they are rounded."


def print_reduction(reduction: Reduction, console: Console) -> None:
    """The rewrites by law, those left out and why, the totals, the verification, and how to load the result."""
    for part in _parts(reduction):
        console.print(part, width=None if isinstance(part, Table) else min(console.width, PROSE))
        console.print()


def print_verification(verification: Verification, console: Console) -> None:
    console.print(_verification_table(verification))
    for line in (*MEANING, STORED):
        console.print(Text(line, "dim"))
    console.print()
    if verification.same:
        console.print(Text("the same function, up to the precision of the stored weights", style="bold green"))
    else:
        console.print(Text(f"different: {difference(verification.worst)}", style="bold red"))


def difference(worst: Error) -> str:
    """In which precision two models differ: in float64, or only in how much their rounding errors grow."""
    size = f"{worst.output} differs by {worst.float64:.1e} in float64"
    if worst.noise is None or worst.noise.small:
        return size
    growth = f"rounding errors in its own precision grow by a factor of {worst.noise.growth:,.1f}"
    if worst.same_in_float64:
        return f"{growth} (at most {FLOORS:g} is allowed); in float64 both are the same function"
    return f"{size}; {growth}"


def _parts(reduction: Reduction) -> Iterator[RenderableType]:
    took = f"  {reduction.seconds:.1f} s" if reduction.seconds else ""
    layout = f"  layout {reduction.layout}"
    yield Text.assemble((one_line(reduction.model), "bold cyan"), layout, took, (f"  deadweight {__version__}", "dim"))
    if reduction.steps:
        yield _rewrites_table(reduction)
    if reduction.skipped:
        yield _skipped_table(reduction)
    yield _totals(reduction)
    if reduction.verification is not None:
        yield _verification_table(reduction.verification)
        yield Text("\n".join((*MEANING, BEFORE_STORING)), "dim")
    for note in reduction.notes:
        yield Text(f"note  {one_line(note)}", style="dim")
    yield _next(reduction)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _rewrites_table(reduction: Reduction) -> Table:
    word = "saves" if reduction.layout == "slim" else "constant now"
    table = _table("code", "law", "parameters", "tier", word, right=(word,))
    by_law: dict[tuple[str, str, str], list[AppliedRewrite]] = defaultdict(list)
    for step in reduction.steps:
        by_law[step.code, step.law, step.tier].append(step)
    for (code, law, tier), steps in by_law.items():
        for i, pattern in enumerate(collapse(s.parameter for s in steps)):
            mine = [s for s in steps if s.parameter in pattern]
            label = (Text(code, style="bold"), Text(law)) if i == 0 else (Text(), Text())
            table.add_row(*label, printable(str(pattern)), tier if i == 0 else "", count(sum(s.saves for s in mine)))
    return table


def _skipped_table(reduction: Reduction) -> Table:
    table = _table("not done", "parameters", "because")
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for s in reduction.skipped:
        by_reason[f"{s.code} {s.law}", s.why].append(s.parameter)
    for (law, why), names in by_reason.items():
        patterns = collapse(names)
        shown = printable(str(patterns[0])) + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else "")
        table.add_row(Text(law, style="dim"), Text(shown, style="dim"), Text(one_line(why), style="dim"))
    return table


def _totals(reduction: Reduction) -> Text:
    gone = reduction.parameters_before - reduction.parameters_after
    words = f"{plural(reduction.parameters_before, 'parameter')} → {reduction.parameters_after:,}"
    words += (
        f"  ({gone:,} gone, {percent(gone, reduction.parameters_before)})" if gone else "  (stock: the same shapes)"
    )
    if reduction.bytes_after:
        words += f"   {file_size(reduction.bytes_before, 2)} → {file_size(reduction.bytes_after, 2)}"
    if reduction.flops_saved:
        words += f"   {reduction.flops_saved:,} FLOPs less per token"
    return Text(words, style="bold")


def _verification_table(verification: Verification) -> Table:
    table = _table(
        "output",
        "error in float64",
        "in own precision",
        "noise floor",
        "rounding grows",
        right=("error in float64", "in own precision", "noise floor", "rounding grows"),
    )
    for e in verification.errors:
        grows = "" if e.noise is None else f"× {e.noise.growth:.2f}"
        style = "green" if e.same else "bold red"
        own, floor = ("not measured" if v is None else f"{v:.1e}" for v in (e.own, e.floor))
        table.add_row(printable(e.output), Text(f"{e.float64:.1e}", style=style), own, floor, grows)
    table.caption = (
        f"on {verification.inputs}; rounding errors (simulated) may grow by a factor of {FLOORS:g}"
        if verification.inputs
        else None
    )
    table.caption_justify = "left"
    return table


def _next(reduction: Reduction) -> Text:
    if reduction.out is None and reduction.module is None:
        return Text("this is the plan; nothing was written")
    if reduction.out is None:
        return Text("the reduced module is in the result's `module`")
    return Text(f"written to {printable(str(reduction.out))}; its README.md says how to load it")
