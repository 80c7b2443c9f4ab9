"""The bound with real numbers of heads, in closed form: how heads spread over lags, and what a budget buys.

Let every group have heads as large as a token, d_m = d, and any real number of them. By Cauchy and Schwarz the best is

    H_m = (D/d)·√β_m / Σ_{k≤M} √β_k,    E = (d/D)·(Σ_{m≤M} √β_m)² + Σ_{k>M} ‖ρ_k‖B,    β_m = ‖ρ_m‖B·1.3e^{0.02m}:

the number of heads grows like the square root of how much depends on a lag, and the error that heads can reduce falls
as 1/D. Narrower heads do not help: for a given number of heads the bound is concave in their size, so the best size is
at an end of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deadweight.allocate.bound import Task


@dataclass(frozen=True)
class Relaxed:
    """Real numbers of heads, all as large as a token."""

    heads: tuple[float, ...]
    error: float


def relax(task: Task, width: int, lags: int | None = None) -> Relaxed:
    """The best real numbers of heads for so many lags, or for the best number of lags."""
    roots = np.sqrt(task.weights * task.placing)
    errors = task.d_token / width * np.cumsum(roots) ** 2 + task.tails[1:]
    best = lags or int(errors.argmin()) + 1
    heads = width / task.d_token * roots[:best] / max(roots[:best].sum(), 1e-300)
    return Relaxed(tuple(heads.tolist()), float(errors[best - 1]))
