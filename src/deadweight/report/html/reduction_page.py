"""The page of a reduction: what went, by which law, what was measured, what was left and why."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from deadweight.reduce.error_limits import FLOORS, Verification
from deadweight.reduce.result import AppliedRewrite, Reduction
from deadweight.report.html.layers import by_layer
from deadweight.report.html.page import byte_text
from deadweight.report.html.report import Report, Section, Table, make_table, used
from deadweight.report.name_pattern import collapse
from deadweight.report.text import one_line, percent

EXACT = (
    "The error is the norm of the difference of both models' outputs over the norm of the original's. The noise floor "
    "is the error of the original in its own precision, measured against itself in float64. Rounding grows by the "
    f"factor shown (simulated); a law that would make it grow by more than {FLOORS:g} is left out."
)


def describe_reduction(r: Reduction) -> Report:
    gone = r.parameters_before - r.parameters_after
    sections = used(
        Section(title="Is it the same function?", prose=(EXACT,), table=verification_table(r.verification))
        if r.verification is not None
        else Section(title="Is it the same function?"),
        Section(title="By law", table=steps_table(r)),
        Section(title="By layer", layers=by_layer(amounts(r), (s.parameter for s in r.steps)) if r.steps else None),
        Section(title="Not done", table=skipped_table(r)),
        Section(title="Load it", prose=(loading(r),)),
        Section(title="Notes", notes=tuple(map(one_line, r.notes))),
    )
    return Report("reduce", r.model, headline(r, gone), lead(r), facts(r, gone), sections)


def headline(r: Reduction, gone: int) -> str:
    planned = r.out is None and r.module is None
    if gone:
        return f"{gone:,} of {r.parameters_before:,} parameters {'would go' if planned else 'are gone'}"
    if r.saves:
        return f"{r.saves:,} of {r.parameters_before:,} parameters {'would be' if planned else 'are'} constant now"
    return f"None of {r.parameters_before:,} parameters could be removed"


def lead(r: Reduction) -> str:
    if r.verification is None:
        return "This is the plan; nothing was written."
    worst = r.verification.worst
    if r.verification.same:
        return f"The same function: the largest error is {worst.float64:.1e} in float64."
    return f"Not the same function: {worst.output} differs by {worst.float64:.1e} in float64."


def facts(r: Reduction, gone: int) -> tuple[tuple[str, str], ...]:
    pairs = [("layout", r.layout), ("parameters", f"{r.parameters_before:,} → {r.parameters_after:,}")]
    pairs += [("share", percent(gone, r.parameters_before))] if gone else []
    pairs += [("bytes", f"{byte_text(r.bytes_before)} → {byte_text(r.bytes_after)}")] if r.bytes_after else []
    pairs += [("FLOPs per token", f"{r.flops_saved:,} less")] if r.flops_saved else []
    return (*pairs, ("time", f"{r.seconds:.1f} s")) if r.seconds else tuple(pairs)


def amounts(r: Reduction) -> list[tuple[str, str, int]]:
    return [(s.parameter, "numbers", s.saves) for s in r.steps]


def steps_table(r: Reduction) -> Table | None:
    by_law: dict[tuple[str, str, str], list[AppliedRewrite]] = defaultdict(list)
    for s in r.steps:
        by_law[s.code, s.law, s.tier].append(s)
    rows = [
        (f"{code} {law}", str(pattern), tier, f"{sum(s.saves for s in steps if s.parameter in pattern):,}")
        for (code, law, tier), steps in by_law.items()
        for pattern in collapse(s.parameter for s in steps)
    ]
    word = "numbers saved" if r.layout == "slim" else "constant now"
    return (
        make_table(("law", "parameters", "exact", word), rows, right=(word,), names=("parameters",)) if rows else None
    )


def skipped_table(r: Reduction) -> Table | None:
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for s in r.skipped:
        by_reason[f"{s.code} {s.law}", one_line(s.why)].append(s.parameter)
    rows = [(law, str(pattern), why) for (law, why), names in by_reason.items() for pattern in collapse(names)]
    return make_table(("law", "parameters", "because"), rows, names=("parameters",)) if rows else None


def verification_table(verification: Verification) -> Table:
    head = ("output", "error in float64", "in own precision", "noise floor", "rounding grows")
    rows = []
    for e in verification.errors:
        own, floor = ("not measured" if v is None else f"{v:.1e}" for v in (e.own, e.floor))
        rows.append((e.output, f"{e.float64:.1e}", own, floor, "" if e.noise is None else f"× {e.noise.growth:.2f}"))
    return make_table(head, rows, right=head[1:], caption=f"measured on {verification.inputs}")


def loading(r: Reduction) -> str:
    if r.out is None:
        return "Without --dry-run the checkpoint is written." if r.module is None else "It is in the result's `module`."
    return f"Written to {Path(r.out).name}; its README.md says how to load it."
