"""deadweight.json and the model card: what was done, and what was measured."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from deadweight.reduce.result import Reduction
from deadweight.reduce.verify import Verification
from deadweight.version import __version__


def manifest(found: Reduction) -> dict[str, Any]:
    """Everything that a later reader may want to know, as plain data."""
    return {
        "deadweight": __version__,
        "source": found.model,
        "layout": found.layout,
        "parameters": {"before": found.parameters_before, "after": found.parameters_after},
        "bytes": {"before": found.bytes_before, "after": found.bytes_after},
        "flops_per_token_saved": found.flops_saved,
        "steps": [
            {
                "code": s.code,
                "law": s.law,
                "parameter": s.parameter,
                "into": list(s.into),
                "saves": s.saves,
                "tier": s.tier,
            }
            for s in found.steps
        ],
        "skipped": [{"code": s.code, "law": s.law, "parameter": s.parameter, "why": s.why} for s in found.skipped],
        "verification": None if found.verification is None else verification_data(found.verification),
    }


def verification_data(found: Verification) -> dict[str, Any]:
    return {
        "inputs": found.inputs,
        "same": found.same,
        "outputs": [
            {
                "output": e.output,
                "float64": finite(e.float64),
                "own": finite(e.own),
                "floor": finite(e.floor),
                "growth": None if e.noise is None else finite(e.noise.growth),
            }
            for e in found.errors
        ],
    }


def finite(value: float | None) -> float | None:
    """JSON has no infinity: an error without bound is null."""
    return value if value is not None and math.isfinite(value) else None


def card(found: Reduction, loading: str) -> str:
    """A README.md for the folder."""
    saved = found.parameters_before - found.parameters_after
    lines = [
        "---",
        "tags: [deadweight]",
        "---",
        f"# {found.name}, reduced exactly",
        "",
        f"Made from `{found.model}` by deadweight {__version__}: the same function, with "
        f"{saved:,} of {found.parameters_before:,} parameters gone ({saved / max(found.parameters_before, 1):.2%}).",
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
    counts, saves = Counter((s.code, s.law) for s in found.steps), Counter[tuple[str, str]]()
    for step in found.steps:
        saves[step.code, step.law] += step.saves
    lines += [f"| {code} {law} | {n} | {saves[code, law]:,} |" for (code, law), n in counts.items()]
    if found.verification is not None:
        lines += ["", "## How it was checked", "", f"Against the original, on {found.verification.inputs}.", ""]
        lines += ["| output | float64 error | own precision | noise floor |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {e.output} | {e.float64:.1e} | {number(e.own)} | {number(e.floor)} |" for e in found.verification.errors
        ]
    lines += ["", "Details: `deadweight.json`. Only what the model returns is kept the same; hidden states may differ."]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
