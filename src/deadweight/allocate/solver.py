"""The exact minimum of the bound over whole numbers M, H_m, d_m.

For every M the price of width (`dual`) gives a lower bound, the floor, and an allocation that fits. Any allocation to M
lags costs

    floor + Σ_m (cost of lag m above φ_m) + λ·(width left over),    all terms ≥ 0,

so an allocation that beats the best known one uses, for every lag, a pair (k, d) within best − floor of φ_m, and few
pairs are that close. Dynamic programming over their widths then gives the best of them: nothing that could win is left
out, and most widths are never visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deadweight.allocate.bound import HeadGroup, Task, error
from deadweight.allocate.constraints import LayerBudget, Rules, WidthLimit, feasible
from deadweight.allocate.dual import LagBlocks, Priced, Problem, best_price, floors, floors_at
from deadweight.allocate.search import EQUAL, BoundQuery, search
from deadweight.errors import DeadweightError


@dataclass(frozen=True)
class Optimum:
    """The best allocation, and the lower bound that the price of width proves."""

    task: Task
    rules: Rules
    limit: WidthLimit  # the budget that decided
    groups: tuple[HeadGroup, ...]  # the first for lag 1
    error: float
    floor: float  # lower bound of all allocations to as many lags
    price: float  # about how much one more unit of width would lower the bound

    @property
    def width(self) -> int:
        return int(sum(g.width for g in self.groups))

    @property
    def heads(self) -> int:
        return sum(g.heads for g in self.groups)


@dataclass(frozen=True)
class Incumbent:
    """The best allocation so far."""

    problem: Problem
    choice: LagBlocks
    value: float
    priced: Priced


def solve(task: Task, budget: LayerBudget | int, rules: Rules | None = None) -> Optimum:
    """Minimise the bound. If nothing fits, DeadweightError names the limit and the nearest feasible one.

    Width that is left over cannot lower the bound.
    """
    rules = rules or Rules()
    limit = feasible(task, LayerBudget(budget) if isinstance(budget, int) else budget, rules)
    sizes = tuple(rules.sizes(task))
    kinds = [(size,) for size in sizes] if rules.one_size else [sizes]
    best: Incumbent | None = None
    for problem in order_by_floor([Problem(task, kind, rules.sharing, limit.width) for kind in kinds]):
        best = best_of(problem, rules.lags, best)
    assert best is not None, "what feasible() lets through has an allocation"
    groups = as_groups(best.problem, best.choice)
    return Optimum(task, rules, limit, groups, error(task, groups), best.priced.floor, best.priced.price)


def split(task: Task, heads: int, size: int, sharing: int = 1) -> tuple[HeadGroup, ...]:
    """The best distribution of so many heads of one size over lags."""
    best = best_of(Problem(task, (size,), sharing, heads * size), None, None)
    if best is None:
        raise DeadweightError(f"found {heads} heads; expected at least {sharing}, which share one key head")
    return as_groups(best.problem, best.choice)


def order_by_floor(problems: list[Problem]) -> list[Problem]:
    """The most promising first, so that the others are soon ruled out."""
    return sorted(problems, key=lambda p: least_floor(p)) if len(problems) > 1 else problems


def least_floor(problem: Problem) -> float:
    """By Cauchy and Schwarz: N blocks of one price for M lags cost at least (Σ √α_m)² / N."""
    n = problem.width // problem.prices.min()
    if n < 1:
        return float("inf")
    roots, weights = np.cumsum(np.sqrt(problem.alpha)), np.cumsum(problem.weights)
    return float((weights * problem.cut.min() + roots**2 / n + problem.tails[1:]).min())


def as_groups(problem: Problem, choice: LagBlocks) -> tuple[HeadGroup, ...]:
    pairs = zip(choice.blocks, choice.places, strict=True)
    return tuple(HeadGroup(int(blocks) * problem.sharing, problem.sizes[place]) for blocks, place in pairs)


def best_of(problem: Problem, lags: int | None, best: Incumbent | None) -> Incumbent | None:
    """The better of `best` and what this problem has to offer."""
    if best is not None and least_floor(problem) >= best.value:
        return best
    proved, prices = floors(problem)
    room = int(problem.width // problem.prices.min())
    chosen = range(1, min(room, len(proved)) + 1) if lags is None else range(lags, min(room, lags) + 1)
    open_: dict[int, Priced] = {}
    for m in sorted(chosen, key=lambda m: proved[m - 1]):
        if best is not None and proved[m - 1] >= best.value * (1 - EQUAL):
            break
        open_[m] = best_price(problem, m, float(prices[m - 1]))
        best = better(best, problem, fill_width(problem, open_[m].choice), open_[m])
    return close_gaps(problem, open_, best)


def close_gaps(problem: Problem, open_: dict[int, Priced], best: Incumbent | None) -> Incumbent | None:
    """Search every number of lags whose floor is below the best. One price serves all numbers of lags for which its
    floor is at least half as close."""
    while open_:
        assert best is not None
        first = min(open_, key=lambda m: open_[m].floor)
        priced, value = open_[first], best.value
        if priced.floor >= value * (1 - EQUAL):
            return best
        proved = floors_at(problem, max(open_), priced.price)
        together = [m for m, p in open_.items() if value - proved[m - 1] <= 2 * (value - p.floor)]
        asked = np.full(max(together), np.inf)
        asked[np.array(together) - 1] = proved[np.array(together) - 1]
        choice = search(BoundQuery(problem, priced.price, asked, value))
        if choice is not None:
            best = better(best, problem, choice, open_[len(choice.blocks)])
        open_ = {m: p for m, p in open_.items() if m not in together}
    return best


def better(best: Incumbent | None, problem: Problem, choice: LagBlocks, priced: Priced) -> Incumbent:
    value = choice.error(problem) + float(problem.tails[len(choice.blocks)])
    return Incumbent(problem, choice, value, priced) if best is None or value < best.value else best


def fill_width(problem: Problem, choice: LagBlocks) -> LagBlocks:
    """Spend the width left over, each time on the lag that gains most."""
    blocks, places = choice.blocks.copy(), choice.places.copy()
    n = len(blocks)
    weights, alpha = problem.weights[:n, None], problem.alpha[:n, None]
    while True:
        own = blocks * problem.prices[places]
        room = (own + problem.width - own.sum())[:, None] // problem.prices
        costs = np.where(room >= 1, weights * problem.cut + alpha / np.maximum(room, 1), np.inf)
        now = problem.weights[:n] * problem.cut[places] + problem.alpha[:n] / blocks
        best = costs.argmin(1)
        gains = now - costs[np.arange(n), best]
        lag = int(gains.argmax())
        if gains[lag] <= EQUAL * max(now.sum(), 1e-300):
            return LagBlocks(blocks, places)
        blocks[lag], places[lag] = room[lag, best[lag]], best[lag]
