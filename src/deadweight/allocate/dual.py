"""The allocation with a price on width: every lag is optimised on its own, in closed form.

Let lag m have k blocks of G heads that share their keys, of size d. It costs w[(1+ε)·√(1 − d/d_token)] + α/k, with
w = ‖ρ_m‖B and α = w·1.3e^{0.02m}/G, and takes G·d·k of the width. At a price λ per unit,

    φ_m(λ) = min_{k,d}  w(1+ε)√(1 − d/d_token) + α/k + λ·G·d·k,

and for every λ ≥ 0 the bound of any M groups within D is at least Σ_{m≤M} φ_m(λ) − λD + Σ_{k>M} w_k.

*For one d* the best k is the largest with k(k−1) ≤ α/(λGd). *For one k* the cost is concave in d up to d_token and
linear from there on, so the best d is an end: the smallest size, the largest up to d_token, or the first above.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deadweight.allocate.bound import Floats, Task

GRID = 512  # prices tried for all M at once
HALVINGS = 50  # of the interval between two of them: to float64's last digit


@dataclass(frozen=True)
class Problem:
    """The integer problem: blocks of `sharing` heads of one of these sizes for every lag, within a width."""

    task: Task
    sizes: tuple[int, ...]  # ascending
    sharing: int
    width: int

    @cached_property
    def weights(self) -> Floats:
        return self.task.weights

    @cached_property
    def alpha(self) -> Floats:
        return self.weights * self.task.placing / self.sharing

    @cached_property
    def tails(self) -> Floats:
        return self.task.tails

    @cached_property
    def cut(self) -> Floats:
        """The truncation error of each size."""
        return self.task.truncation(np.array(self.sizes))

    @cached_property
    def prices(self) -> Floats:
        """Width of one block of each size."""
        return self.sharing * np.array(self.sizes, dtype=float)

    @cached_property
    def ends(self) -> list[int]:
        """Indices of the sizes that can be optimal at a price."""
        below = [i for i, size in enumerate(self.sizes) if size <= self.task.d_token]
        above = [i for i, size in enumerate(self.sizes) if size > self.task.d_token]
        return sorted({*below[:1], *below[-1:], *above[:1]})


@dataclass(frozen=True)
class LagBlocks:
    """For every lag its number of blocks, and the index of its size."""

    blocks: Floats
    places: NDArray[np.intp]

    def width(self, problem: Problem) -> float:
        return float((self.blocks * problem.prices[self.places]).sum())

    def error(self, problem: Problem) -> float:
        """The bound of these lags, without the lags that have no heads."""
        n = len(self.blocks)
        return float((problem.weights[:n] * problem.cut[self.places] + problem.alpha[:n] / self.blocks).sum())


def blocks_at(alpha: Floats, cost: Floats | float) -> Floats:
    """The k that minimises α/k + cost·k."""
    return np.maximum(1.0, np.floor(0.5 + np.sqrt(0.25 + alpha / cost)))


@dataclass(frozen=True)
class PricedLags:
    """The optimum of each lag at a price: its blocks, and φ_m."""

    price: float
    choice: LagBlocks
    phi: Floats


def at_price(problem: Problem, lags: int, price: float) -> PricedLags:
    """The optimum of each of the first lags at this price."""
    alpha, weights = problem.alpha[:lags, None], problem.weights[:lags, None]
    ends = np.array(problem.ends, dtype=np.intp)
    cost = price * problem.prices[ends]
    blocks = blocks_at(alpha, cost)
    values = weights * problem.cut[ends] + alpha / blocks + cost * blocks
    best, rows = values.argmin(1), np.arange(lags)
    return PricedLags(price, LagBlocks(blocks[rows, best], ends[best]), values[rows, best])


def price_range(problem: Problem) -> tuple[float, float]:
    """A price so low that one lag alone takes more than the whole width, and one so high that all take the least."""
    positive = problem.alpha[problem.alpha > 0]
    low = positive.min() / problem.prices.max() / (problem.width + 1.0) ** 2 / 4
    high = (problem.weights * problem.cut.max() + problem.alpha).max() / problem.prices.min() * 2
    return float(low), float(high)


def floors(problem: Problem) -> tuple[Floats, Floats]:
    """For M = 1, 2, … a lower bound of all allocations to M lags, and the price that proves it."""
    prices = np.geomspace(*price_range(problem), GRID)
    values = np.full((len(problem.weights), GRID), np.inf)
    for place in problem.ends:
        cost = (prices * problem.prices[place])[None, :]
        alpha = problem.alpha[:, None]
        blocks = blocks_at(alpha, cost)
        np.minimum(values, problem.weights[:, None] * problem.cut[place] + alpha / blocks + cost * blocks, out=values)
    duals = np.cumsum(values, 0) - prices * problem.width + problem.tails[1:, None]
    best = duals.argmax(1)
    return duals[np.arange(len(best)), best], prices[best]


def floors_at(problem: Problem, lags: int, price: float) -> Floats:
    """For M = 1, …, lags the lower bound of all allocations to M lags that this price proves."""
    values = at_price(problem, lags, price).phi
    return np.cumsum(values) - price * problem.width + problem.tails[1 : lags + 1]


@dataclass(frozen=True)
class Priced:
    """The best price for M lags: the lower bound that it proves, and a choice within the width."""

    price: float
    floor: float
    choice: LagBlocks


def best_price(problem: Problem, lags: int, near: float) -> Priced:
    """Bisect the prices around `near` until the optimum just fits. The smallest allocation to so many lags must fit."""
    step = (price_range(problem)[1] / price_range(problem)[0]) ** (2 / (GRID - 1))
    low, high = near / step, near * step
    while at_price(problem, lags, high).choice.width(problem) > problem.width:
        low, high = high, high * 2
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        fits = at_price(problem, lags, middle).choice.width(problem) <= problem.width
        low, high = (low, middle) if fits else (middle, high)
    return Priced(high, float(floors_at(problem, lags, high)[-1]), at_price(problem, lags, high).choice)
