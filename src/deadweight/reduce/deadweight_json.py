"""What deadweight.json and `--json` say about a reduction, and the numbers of its model card."""

from __future__ import annotations

import math
from collections import Counter

from deadweight.laws.page import pages
from deadweight.reduce.error_limits import Verification
from deadweight.reduce.result import Reduction
from deadweight.save.model_card import ErrorRow, LawRow, ReducedCard
from deadweight.save.original_card import shown_source
from deadweight.source.type_aliases import JsonObject
from deadweight.version import __version__


def manifest(reduction: Reduction) -> JsonObject:
    """The whole result as plain data."""
    return {
        "deadweight": __version__,
        "source": shown_source(reduction.model),
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


def model_card(reduction: Reduction) -> ReducedCard:
    """The numbers of the model card; its sentences are in `save/model_card.py`."""
    counts, saves = Counter((s.code, s.law) for s in reduction.steps), Counter[tuple[str, str]]()
    for step in reduction.steps:
        saves[step.code, step.law] += step.saves
    verification, sentences = reduction.verification, {page.code: page.summary for page in pages()}
    return ReducedCard(
        source=reduction.model,
        layout=reduction.layout,
        parameters=(reduction.parameters_before, reduction.parameters_after),
        laws=tuple(
            LawRow(f"{code} {law}", n, saves[code, law], sentences.get(code, "")) for (code, law), n in counts.items()
        ),
        inputs=None if verification is None else verification.inputs,
        errors=()
        if verification is None
        else tuple(ErrorRow(e.output, e.float64, e.own, e.floor) for e in verification.errors),
    )
