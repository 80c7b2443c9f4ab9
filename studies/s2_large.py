"""The first series of the query study at 38 M parameters: its lengths, its sweeps and its record.

12 layers of width 512, context 512, bytes of enwik8 in its usual split (90 M to train on, the next 5 M to judge by).
Runs have three lengths: *short* (20 M bytes), *middle* (67 M) and *long* (157 M), each with its whole schedule.

The learning rate of a shape was swept on short runs of one seed, by factors of two until the best has a worse neighbour
on both sides. Longer runs want lower rates: rate ∝ steps^−0.32 (arXiv 2409.19913), for every shape alike. Runs of one
seed begin with the same weights and see the same text in the same order.

The series is finished: `large.py` beside this file sweeps at the length that is judged, and continues from its runs of
67 M bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from large_record import loss_of, read_record
from large_shapes import PROJECTIONS as SHAPES
from large_shapes import SCALED, SIZES, counts

from deadweight.train.ensemble import Member

__all__ = ["SHAPES", "SIZES", "counts", "loss_of", "read_record"]
Run = dict[str, Any]
BATCH = 32
SHORT, MIDDLE, LONG = 1216, 4096, 9600  # steps
QUICK = 1_000_000  # bytes of validation text that judge a short run
LAW = -0.32
RATES = (5e-4, 1e-3, 2e-3)
EXTREMES = (1e-4, 3e-2)
SEEDS = (0, 1, 2)
DECAY = 0.1
CORE = ("full", "identity Q", "identity V", "identity K")


def shape_of(run: Run) -> str:
    return str(run["graph"]).removesuffix(SCALED)


def sweep(runs: list[Run], shape: str) -> dict[float, float]:
    """Loss by learning rate, of the short runs of the first seed."""
    plain = asdict(Member(SEEDS[0], 0.0, DECAY))
    losses = {}
    for run in runs:
        rate = run["member"]["learning_rate"]
        if run["graph"] == shape and run["steps"] == SHORT and run["member"] == {**plain, "learning_rate": rate}:
            losses[rate] = loss_of(run)
    return losses


def rates_to_try(swept: dict[float, float]) -> list[float]:
    """The first three learning rates, then more while the best is at the edge. Empty when the sweep is finished."""
    missing = [rate for rate in RATES if rate not in swept]
    if missing:
        return missing
    best = min(swept, key=lambda rate: swept[rate])
    further = {max(swept): 2 * best, min(swept): best / 2}.get(best)
    return [further] if further is not None and EXTREMES[0] < further < EXTREMES[1] else []


def best_rate(swept: dict[float, float]) -> float:
    return min(swept, key=lambda rate: swept[rate])


def optimum(swept: dict[float, float]) -> float:
    """The vertex of the parabola through the best learning rate and its neighbours, in the logarithm of the rate."""
    best = best_rate(swept)
    low, here, high = (swept.get(rate, math.inf) for rate in (best / 2, best, 2 * best))
    if not math.isfinite(low + high):
        return best
    return float(f"{best * 2 ** (0.5 * (low - high) / (low - 2 * here + high)):.3g}")


def rate_for(swept: dict[float, float], steps: int) -> float:
    return float(f"{optimum(swept) * (steps / SHORT) ** LAW:.3g}")
