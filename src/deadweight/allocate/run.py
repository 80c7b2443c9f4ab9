"""From a profile and a budget to the best allocation: the function behind `deadweight allocate bound`."""

from __future__ import annotations

from collections.abc import Sequence

from deadweight.allocate.bound import Task
from deadweight.allocate.constraints import LayerBudget, Rules
from deadweight.allocate.profile import Profile, read_profile
from deadweight.allocate.solver import Optimum, solve
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent


def allocate(
    profile: str | Profile | Sequence[float],
    budget: int | LayerBudget,
    *,
    d_token: int | None = None,
    lags: int | None = None,
    rules: Rules | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    progress: Progress = silent,
) -> Optimum:
    """The number of lags M, heads H_m and head dimensions d_m that minimise the error bound within a budget.

    `profile` says how much depends on each lag: numbers, or a name such as power:1, text:FILE, model:MODEL (of `lags`
    lags). `d_token` is the dimension of a token; a measured profile comes with one.
    """
    known = read_profile(profile, lags, progress=progress) if isinstance(profile, str) else profile
    known = known if isinstance(known, Profile) else Profile(tuple(known), "given")
    size = d_token or known.d_token
    if size is None:
        raise DeadweightError(
            f"found no token dimension: {known.source} has none; expected one (--token-dim), or a profile that "
            "measures it (text:FILE, model:MODEL)"
        )
    return solve(Task(known.values, size, scale, epsilon), budget, rules)
