"""What a compression did and what it costs, as plain data, and as the README of its folder."""

from __future__ import annotations

import math
from typing import Any

from deadweight.compress.result import Compression, Judgement
from deadweight.version import __version__


def as_data(found: Compression) -> dict[str, Any]:
    """Everything as plain data, for deadweight.json and --json."""
    return {
        "deadweight": __version__,
        "source": found.model,
        "layout": found.layout,
        "budget": {"what": "attention", "asked": found.asked, "share": found.share},
        "kv_numbers_per_token": {"before": found.kv_before, "after": found.kv_after},
        "parameters": {"before": found.parameters_before, "after": found.parameters_after},
        "predicted": found.predicted,
        "measured": judgement_data(found.judgement),
        "measured_before_healing": None
        if found.judgement_before_healing is None
        else judgement_data(found.judgement_before_healing),
        "healed_steps": found.healed,
        "calibration_tokens": found.tokens,
        "seconds": round(found.seconds, 2),
        "seconds_of_a_forward_pass": round(found.seconds_forward, 2),
        "kept": {
            path: {"values": list(k.values), "non_rotary": list(k.non_rotary), "rotary_pairs": list(k.pairs)}
            for path, k in found.kept.items()
        },
        "left_alone": found.left_alone,
        "notes": list(found.notes),
    }


def judgement_data(found: Judgement) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        found.what: found.error,
        "loss_before": found.loss_before,
        "loss_after": found.loss_after,
        "cosine": found.cosine,
    }


def outcome(found: Judgement) -> str:
    """What it costs, in one line."""
    if found.loss_before is not None and found.loss_after is not None:
        before, after = (math.exp(min(x, 700.0)) for x in (found.loss_before, found.loss_after))
        return (
            f"perplexity {before:,.2f} → {after:,.2f} ({after / before - 1:+.2%}), KL {found.error:.2e} nats per token "
            f"on {found.tokens:,} tokens held back"
        )
    if found.cosine is not None:
        return (
            f"cosine to the original {found.cosine:.4f}, relative squared error {found.error:.2e}, "
            f"on {found.tokens:,} tokens held back"
        )
    return f"KL {found.error:.2e} nats per output, on {found.tokens:,} held back"


def card(found: Compression, loading: str) -> str:
    """A README.md for the folder."""
    lines = [
        "---",
        "tags: [deadweight]",
        "---",
        f"# {found.model.rstrip('/').rpartition('/')[2]}, with smaller heads",
        "",
        f"Made from `{found.model}` by deadweight {__version__}: {found.kv_after:,} of {found.kv_before:,} "
        f"numbers per token in the cache, {found.parameters_after:,} of {found.parameters_before:,} parameters. This "
        "is not the same function; what it costs was measured:",
        "",
        f"{outcome(found.judgement)}.",
        "",
        "## Loading",
        "```python",
        loading,
        "```",
        "",
        "How much every head keeps: `deadweight.json`.",
    ]
    return "\n".join(lines) + "\n"
