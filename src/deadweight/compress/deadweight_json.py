"""What deadweight.json and `--json` say about a compression, and the numbers of its model card."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from deadweight.compress.cache_result import CacheCompression, CurvePoint, outcome_line, perplexity_rise
from deadweight.compress.result import Compression, Judgement, outcome
from deadweight.save.model_card import CodedCacheCard, CurveRow, SmallerHeadsCard
from deadweight.save.original_card import shown_source
from deadweight.version import __version__


def heads_data(result: Compression) -> dict[str, Any]:
    """Everything as plain data, for deadweight.json and --json."""
    return {
        "deadweight": __version__,
        "source": shown_source(result.model),
        "layout": result.layout,
        "budget": {"what": "attention", "asked": result.asked, "share": result.share},
        "kv_numbers_per_token": {"before": result.kv_before, "after": result.kv_after},
        "parameters": {"before": result.parameters_before, "after": result.parameters_after},
        "predicted": result.predicted,
        "measured": judgement_data(result.judgement),
        "measured_before_healing": None
        if result.judgement_before_healing is None
        else judgement_data(result.judgement_before_healing),
        "healed_steps": result.healed,
        "calibration_tokens": result.tokens,
        "seconds": round(result.seconds, 2),
        "seconds_of_a_forward_pass": round(result.seconds_forward, 2),
        "kept": {
            path: {"values": list(k.values), "non_rotary": list(k.non_rotary), "rotary_pairs": list(k.pairs)}
            for path, k in result.kept.items()
        },
        "left_alone": result.left_alone,
        "notes": list(result.notes),
    }


def judgement_data(judgement: Judgement) -> dict[str, Any]:
    return {
        "tokens": judgement.tokens,
        judgement.what: judgement.error,
        "loss_before": judgement.loss_before,
        "loss_after": judgement.loss_after,
        "cosine": judgement.cosine,
    }


def cache_data(result: CacheCompression) -> dict[str, Any]:
    """Everything as plain data, for deadweight.json and --json."""
    before, after = result.bytes_per_token
    return {
        "deadweight": __version__,
        "source": shown_source(result.model),
        "cache": "coded",
        "budget": {"asked": result.asked, "share": result.point.share, "tokens": result.tokens},
        "bytes_per_token": {"before": before, "after": after},
        "calibration_tokens": result.calibration_tokens,
        "points": [point_data(point) for point in result.points],
        "beside": [point_data(point) for point in result.beside],
        "before_healing": None if result.before_healing is None else point_data(result.before_healing),
        "healed_steps": result.healed,
        "caches": {path: asdict(spec) for path, spec in result.caches.items()},
        "seconds": round(result.seconds, 2),
        "seconds_of_a_forward_pass": round(result.seconds_forward, 2),
        "notes": list(result.notes),
    }


def point_data(point: CurvePoint) -> dict[str, Any]:
    texts = {
        name: {
            "tokens": j.tokens,
            "kl": j.error,
            "loss_before": j.loss_before,
            "loss_after": j.loss_after,
            "perplexity_rise": perplexity_rise(j),
        }
        for name, j in point.judgements.items()
    }
    return {"share": point.share, "predicted": point.predicted, "texts": texts}


def heads_card(result: Compression) -> SmallerHeadsCard:
    """The numbers of the model card; its sentences are in `save/model_card.py`."""
    return SmallerHeadsCard(
        source=result.model,
        cached_numbers=(result.kv_before, result.kv_after),
        parameters=(result.parameters_before, result.parameters_after),
        outcome=outcome(result.judgement),
    )


def cache_card(result: CacheCompression) -> CodedCacheCard:
    """The numbers of the model card; its sentences are in `save/model_card.py`."""
    outcomes = (outcome_line(name, judgement) for name, judgement in result.point.judgements.items())
    return CodedCacheCard(
        result.model,
        result.bytes_per_token,
        result.tokens,
        result.point.share,
        tuple(outcomes),
        tuple(CurveRow(p.share, p.predicted, measured_words(p)) for p in (*result.beside, *result.points)),
    )


def measured_words(point: CurvePoint) -> str:
    """The loss of a size on every held-out text; empty if it was not tried."""
    return ", ".join(
        f"{name}: perplexity {perplexity_rise(j):+.2%}, KL {j.error:.1e}" for name, j in point.judgements.items()
    )
