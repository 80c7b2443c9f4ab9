"""The error bound of attention that looks back: one group of heads for each lag (arXiv 2510.03784).

    E_D ≤ Σ_{m≤M} ‖ρ_m‖B [(1+ε)·1{d_m ≤ d}·√(1 − d_m/d) + 1.3·e^{0.02m}/H_m] + Σ_{k>M} ‖ρ_k‖B,    Σ H_m·d_m ≤ D

Lag m has H_m heads of dimension d_m. The first term is the part of a token (d numbers) that narrower heads cut off, the
second the error of H_m heads in singling out the token m back, and the last the lags without heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deadweight.errors import DeadweightError

Floats = NDArray[np.float64]
PLACING, GROWTH = 1.3, 0.02  # the error of singling out lag m is 1.3·e^{0.02m} / heads


@dataclass(frozen=True)
class Task:
    """The task of a layer: how much depends on each lag (‖ρ_m‖ for m = 1, 2, …), and the dimension of a token."""

    profile: tuple[float, ...]
    d_token: int  # d: effective dimension of a token
    scale: float = 1.0  # B: bound on the norm of a token
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", check_profile(self.profile))
        if not isinstance(self.d_token, int) or self.d_token < 1:
            raise DeadweightError(f"found a token dimension of {self.d_token!r}; expected a whole number above zero")
        for name, value, least in (("B", self.scale, "above zero"), ("epsilon", self.epsilon, "zero or more")):
            if not math.isfinite(value) or value < 0 or (name == "B" and value == 0):
                raise DeadweightError(f"found {name} = {value!r}; expected a number, {least}")

    @property
    def weights(self) -> Floats:
        """‖ρ_m‖·B."""
        return np.array(self.profile) * self.scale

    @property
    def placing(self) -> Floats:
        """1.3·e^{0.02m}: the error of one head in singling out lag m."""
        return PLACING * np.exp(GROWTH * np.arange(1, len(self.profile) + 1))

    @property
    def tails(self) -> Floats:
        """The error of the lags after M, which have no heads, for M = 0, 1, …"""
        return np.append(np.cumsum(self.weights[::-1])[::-1], 0.0)

    def truncation(self, size: ArrayLike) -> Floats:
        """(1+ε)·√(1 − size/d), and zero for heads as large as a token or larger."""
        return np.asarray((1 + self.epsilon) * np.sqrt(np.maximum(0.0, 1 - np.asarray(size) / self.d_token)))


@dataclass(frozen=True)
class HeadGroup:
    """The heads that attend to one lag. The bound takes any size above zero; a model takes whole numbers."""

    heads: int
    size: float

    @property
    def width(self) -> float:
        return self.heads * self.size


def check_profile(profile: Sequence[float]) -> tuple[float, ...]:
    """The profile as floats; an error unless all are finite, none is negative, and one is above zero."""
    values = tuple(float(v) for v in profile)
    for lag, value in enumerate(values, 1):
        if not math.isfinite(value) or value < 0:
            raise DeadweightError(
                f"found {value!r} at lag {lag} of the profile; expected a finite number, zero or more"
            )
    if not any(values):
        given = "no lags" if not values else f"{len(values)} lags, all zero,"
        raise DeadweightError(f"found {given} in the profile; expected at least one number above zero")
    return values


def lag_errors(task: Task, groups: Sequence[HeadGroup]) -> Floats:
    """The term of each lag in the bound: first the lags with heads, then those without."""
    if len(groups) > len(task.profile):
        raise DeadweightError(
            f"found heads for {len(groups)} lags; expected at most the {len(task.profile)} of the profile"
        )
    brackets = np.ones(len(task.profile))
    for place, group in enumerate(groups):
        brackets[place] = task.truncation(group.size) + task.placing[place] / group.heads
    return task.weights * brackets


def error(task: Task, groups: Sequence[HeadGroup]) -> float:
    """The bound for these groups of heads, the first for lag 1."""
    return float(lag_errors(task, groups).sum())


def curve(task: Task, width: int, heads: Sequence[int], lags: int = 1) -> list[float]:
    """The bound by heads per lag when all groups are alike: size = D / (lags·heads), a real number.

    Whole sizes would give another curve: 128/9 rounded down is 14, and √(1 − 14/16) is not √(1 − 128/9/16).
    """
    return [error(task, [HeadGroup(h, width / (lags * h))] * lags) for h in heads]
