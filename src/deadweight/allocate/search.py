"""Dynamic programming over the few choices that can still beat the best one known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deadweight.allocate.bound import Floats
from deadweight.allocate.dual import LagBlocks, PricedLags, Problem, at_price

EQUAL = 1e-12  # relative: two sums of some hundred numbers that differ by less are one in float64
START = 64  # the first search is limited to this fraction of the gap between the best known and its lower bound


@dataclass(frozen=True)
class Offer:
    """The choices of one lag, narrowest first: blocks, sizes, widths, and their cost above φ."""

    blocks: Floats
    places: NDArray[np.intp]
    widths: NDArray[np.int64]  # in units that divide the width of every block
    above: Floats


@dataclass(frozen=True)
class BoundQuery:
    """Is there a choice that costs less than `best`, for one of these numbers of lags with its lower bound?"""

    problem: Problem
    price: float
    floors: Floats  # lower bounds for M = 1, 2, …; infinite where M is not searched
    best: float

    @property
    def gaps(self) -> Floats:
        """The largest cost above the lower bound that can still win, for M lags or more."""
        return np.maximum.accumulate((self.best - self.floors)[::-1])[::-1]


def search(query: BoundQuery) -> LagBlocks | None:
    """The best choice that costs less than the best known, if there is one. Small gaps are searched first: a better
    choice there narrows the rest."""
    problem, price, result = query.problem, query.price, None
    limit = float(query.gaps[0]) / START
    while True:
        offers = list(list_offers(problem, len(query.floors), price, limit))
        picked = cheapest(offers, query, limit)
        if picked is not None:
            result = picked
            value = picked.error(problem) + float(problem.tails[len(picked.blocks)])
            query = BoundQuery(problem, price, query.floors, value)
        gap = float(query.gaps[0])
        if limit >= gap:
            return result
        limit = min(4 * limit, gap)


def unit(problem: Problem) -> int:
    return problem.sharing * math.gcd(*problem.sizes)


def list_offers(problem: Problem, lags: int, price: float, gap: float) -> Iterator[Offer]:
    """For each lag all (k, d) that cost at most φ + gap.

    For one d these are the k between the roots of cost·k² − τk + α = 0, with cost = price·G·d and τ = φ + gap − the
    truncation error of d.
    """
    priced, cost = at_price(problem, lags, price), price * problem.prices
    fixed = problem.weights[:lags, None] * problem.cut
    alpha = problem.alpha[:lags, None]
    tau = gap + priced.phi[:, None] - fixed
    inside = tau**2 - 4 * cost * alpha
    root = np.sqrt(np.maximum(inside, 0.0))
    first = np.maximum(np.ceil((tau - root) / (2 * cost) * (1 - 1e-9)), 1.0)
    last = np.minimum(np.floor((tau + root) / (2 * cost) * (1 + 1e-9)), problem.width // problem.prices)
    some = (tau > 0) & (inside >= -1e-9 * tau**2) & (first <= last)
    for lag in range(lags):
        places = np.flatnonzero(some[lag])
        counts = (last - first)[lag, places].astype(int) + 1
        blocks = np.concatenate([np.arange(n) for n in counts] or [np.array([])]) + np.repeat(
            first[lag, places], counts
        )
        yield prune(problem, priced, lag, blocks, np.repeat(places, counts))


def prune(problem: Problem, priced: PricedLags, lag: int, blocks: Floats, places: NDArray[np.intp]) -> Offer:
    """The choices of a lag, without those that a narrower one is at least as good as."""
    value = problem.weights[lag] * problem.cut[places] + problem.alpha[lag] / blocks
    taken = blocks * problem.prices[places]
    order = np.lexsort((value, taken))
    before = np.minimum.accumulate(np.concatenate([[np.inf], value[order]]))[:-1]
    kept = order[value[order] < before]
    widths = np.round(taken[kept] / unit(problem)).astype(np.int64)
    above = value[kept] + priced.price * taken[kept] - float(priced.phi[lag])
    return Offer(blocks[kept], places[kept], widths, np.maximum(above, 0.0))


@dataclass(frozen=True)
class Frontier:
    """After some lags: the least cost above φ by the width used so far (from `low` on), and the last lag's choice."""

    low: int
    paid: Floats
    chosen: NDArray[np.int32]


def cheapest(offers: Sequence[Offer], query: BoundQuery, limit: float) -> LagBlocks | None:
    """One choice per lag, for the best number of lags: the cost above φ, plus the price of the width left over, is
    least, and at most `limit` above its lower bound."""
    problem = query.problem
    room, price = problem.width // unit(problem), query.price * unit(problem)
    frontiers = [Frontier(0, np.zeros(1), np.zeros(1, dtype=np.int32))]
    best, end = query.best * (1 - EQUAL), (0, 0)
    for lags, (offer, gap) in enumerate(zip(offers, query.gaps, strict=True), 1):
        last = extend(frontiers[-1], offer, room, min(limit, gap)) if len(offer.blocks) else None
        if last is None:
            break
        frontiers.append(last)
        totals = query.floors[lags - 1] + last.paid + price * (room - last.low - np.arange(len(last.paid)))
        if totals.min() < best:
            best, end = float(totals.min()), (lags, last.low + int(totals.argmin()))
    return trace_back(frontiers[: end[0] + 1], offers, end[1]) if end[0] else None


def extend(frontier: Frontier, offer: Offer, room: int, gap: float) -> Frontier | None:
    """One lag more: a (min, +) convolution, without what does not fit or costs more than the gap."""
    least, n = int(offer.widths[0]), len(frontier.paid)
    paid = np.full(n + int(offer.widths[-1]) - least, np.inf)
    chosen = np.zeros(len(paid), dtype=np.int32)
    for place, (width, above) in enumerate(zip(offer.widths, offer.above, strict=True)):
        part = slice(int(width) - least, int(width) - least + n)
        total = frontier.paid + above
        lower = total < paid[part]
        paid[part] = np.where(lower, total, paid[part])
        chosen[part] = np.where(lower, place, chosen[part])
    low = frontier.low + least
    alive = np.flatnonzero(paid[: max(0, room - low + 1)] <= gap)
    if len(alive) == 0:
        return None
    kept = slice(int(alive[0]), int(alive[-1]) + 1)
    return Frontier(low + int(alive[0]), np.where(paid[kept] <= gap, paid[kept], np.inf), chosen[kept])


def trace_back(frontiers: Sequence[Frontier], offers: Sequence[Offer], width: int) -> LagBlocks:
    """From the width used in the end back to the choice of each lag."""
    blocks, places = [], []
    for frontier, offer in zip(frontiers[:0:-1], offers[len(frontiers) - 2 :: -1], strict=True):
        pick = int(frontier.chosen[width - frontier.low])
        blocks.append(offer.blocks[pick])
        places.append(offer.places[pick])
        width -= int(offer.widths[pick])
    return LagBlocks(np.array(blocks[::-1]), np.array(places[::-1], dtype=np.intp))
