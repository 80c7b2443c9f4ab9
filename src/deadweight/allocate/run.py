"""From a profile by name and a budget to the best allocation: what the command calls, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from deadweight.allocate.bound import Task
from deadweight.allocate.profile import Profile, read_profile
from deadweight.allocate.rules import Budget, Rules
from deadweight.allocate.solver import Optimum, solve
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent


def allocate(
    profile: str | Profile | Sequence[float],
    budget: int | Budget,
    *,
    d_token: int | None = None,
    lags: int | None = None,
    rules: Rules | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    say: Progress = silent,
) -> Optimum:
    """The M, H_m and d_m that minimise the error bound within a budget.

    `profile` says how much depends on each lag: numbers, or a name such as power:1, text:FILE, model:MODEL (of `lags`
    lags). A measured profile knows how large a token is; for others `d_token` says it.
    """
    return solve(make_task(profile, d_token, lags, scale, epsilon, say), budget, rules)


def make_task(
    profile: str | Profile | Sequence[float],
    d_token: int | None = None,
    lags: int | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    say: Progress = silent,
) -> Task:
    known = read_profile(profile, lags, say=say) if isinstance(profile, str) else profile
    known = known if isinstance(known, Profile) else Profile(tuple(known), "given")
    size = d_token or known.d_token
    if size is None:
        raise DeadweightError(
            f"found no token dimension for the profile {known.source}; expected one (--token-dim), or a measured "
            "profile (text:FILE, model:MODEL), which brings its own"
        )
    return Task(known.values, size, scale, epsilon)
