"""deadweight.json and the model card: the rewrites, and the measured errors."""

from __future__ import annotations

import math
from collections import Counter

from deadweight.reduce.comparison import Verification
from deadweight.reduce.result import Reduction
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__


def manifest(reduction: Reduction) -> JsonObject:
    """The whole result as plain data."""
    return {
        "deadweight": __version__,
        "source": reduction.model,
        "layout": reduction.layout,
        "parameters": {"before": reduction.parameters_before, "after": reduction.parameters_after},
        "bytes": {"before": reduction.bytes_before, "after": reduction.bytes_after},
        "flops_per_token_saved": reduction.flops_saved,
        "steps": [
            {
                "code": s.code,
                "law": s.law,
                "parameter": s.parameter,
                "into": list(s.into),
                "saves": s.saves,
                "tier": s.tier,
            }
            for s in reduction.steps
        ],
        "skipped": [{"code": s.code, "law": s.law, "parameter": s.parameter, "why": s.why} for s in reduction.skipped],
        "verification": None if reduction.verification is None else verification_data(reduction.verification),
    }


def verification_data(verification: Verification) -> JsonObject:
    return {
        "inputs": verification.inputs,
        "same": verification.same,
        "outputs": [
            {
                "output": e.output,
                "float64": finite(e.float64),
                "own": finite(e.own),
                "floor": finite(e.floor),
                "growth": None if e.noise is None else finite(e.noise.growth),
            }
            for e in verification.errors
        ],
    }


def finite(value: float | None) -> float | None:
    """JSON has no infinity: an infinite error becomes null."""
    return value if value is not None and math.isfinite(value) else None


def card(reduction: Reduction, loading: str) -> str:
    """A README.md for the folder."""
    before = reduction.parameters_before
    saved = before - reduction.parameters_after
    lines = [
        "---",
        "tags: [deadweight]",
        "---",
        f"# {reduction.name}, reduced exactly",
        "",
        f"Made from `{reduction.model}` by deadweight {__version__}: the same function, with "
        f"{saved:,} of {before:,} parameters gone ({saved / max(before, 1):.2%}).",
        "",
        "## Loading",
        "```python",
        loading,
        "```",
        "",
        "## What was done",
        "",
        "| law | places | parameters saved |",
        "| --- | --- | --- |",
    ]
    counts, saves = Counter((s.code, s.law) for s in reduction.steps), Counter[tuple[str, str]]()
    for step in reduction.steps:
        saves[step.code, step.law] += step.saves
    lines += [f"| {code} {law} | {n} | {saves[code, law]:,} |" for (code, law), n in counts.items()]
    if reduction.verification is not None:
        lines += ["", "## How it was checked", "", f"Against the original, on {reduction.verification.inputs}.", ""]
        lines += ["| output | float64 error | own precision | noise floor |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {e.output} | {e.float64:.1e} | {number(e.own)} | {number(e.floor)} |"
            for e in reduction.verification.errors
        ]
    lines += ["", "Details: `deadweight.json`. Only what the model returns is kept the same; hidden states may differ."]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
