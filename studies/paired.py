"""Differences between runs that are paired by their seed, and the words for what an interval decides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

MATTERS = 0.005  # bits per byte: a smaller difference does not decide a design
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # standard errors of a 95 % interval, by pairs
Bits = Mapping[int, float]  # bits per byte, by seed


@dataclass(frozen=True)
class Difference:
    """Mean difference of pairs with equal seeds, in bits per byte, and its standard error."""

    mean: float
    error: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"

    @property
    def margin(self) -> float:
        """Half of the 95 % confidence interval, by Student's t."""
        return STUDENT[self.seeds] * self.error

    @property
    def is_worse(self) -> bool:
        return self.mean > self.margin

    @property
    def is_better(self) -> bool:
        return self.mean < -self.margin

    @property
    def is_small(self) -> bool:
        """Whether the whole interval is closer to zero than what matters."""
        return abs(self.mean) + self.margin < MATTERS


def difference(one: Bits, other: Bits) -> Difference | None:
    """The difference of the pairs; None for fewer than three, or if a run diverged."""
    pairs = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if len(pairs) < 3 or not all(map(math.isfinite, pairs)):
        return None
    return Difference(statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def words(gap: Difference | None) -> str:
    """What the interval decides: a sign, a size, or nothing yet."""
    if gap is None:
        return "not run"
    if gap.is_small:
        return "no difference that matters"
    if gap.is_better or gap.is_worse:
        return "better" if gap.is_better else "worse"
    return "not decided"
