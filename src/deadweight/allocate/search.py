"""Dynamic programming over the few choices that could still beat the best one known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deadweight.allocate.bound import Floats
from deadweight.allocate.dual import Choice, Problem, at_price

EQUAL = 1e-12  # relative: two sums of some hundred numbers that differ by less are one in float64
START = 64  # a choice this many times nearer to its floor than the best known is looked for first


@dataclass(frozen=True)
class Offer:
    """What one lag may choose, narrowest first: blocks, size, the width they take, what is paid above φ."""

    blocks: Floats
    places: NDArray[np.intp]
    widths: NDArray[np.int64]  # in units that divide the width of every block
    above: Floats


@dataclass(frozen=True)
class Question:
    """Does a choice for one of these numbers of lags, each with its floor at this price, cost less than the best?"""

    problem: Problem
    price: float
    floors: Floats  # for M = 1, 2, …; infinite for those that are not asked about
    best: float

    @property
    def gaps(self) -> Floats:
        """How far above its floor a choice for M lags, or for more, may be: never more after more lags."""
        return np.maximum.accumulate((self.best - self.floors)[::-1])[::-1]


def searched(question: Question) -> Choice | None:
    """The best choice that costs less than the best known, if there is one. Small gaps are tried first: what is found
    there narrows the rest."""
    problem, price, result = question.problem, question.price, None
    limit = float(question.gaps[0]) / START
    while True:
        offers = list(offered(problem, len(question.floors), price, limit))
        picked = cheapest(offers, question, limit)
        if picked is not None:
            result = picked
            value = picked.error(problem) + float(problem.tails[len(picked.blocks)])
            question = Question(problem, price, question.floors, value)
        gap = float(question.gaps[0])
        if limit >= gap:
            return result
        limit = min(4 * limit, gap)


def unit(problem: Problem) -> int:
    return problem.sharing * math.gcd(*problem.sizes)


def offered(problem: Problem, lags: int, price: float, gap: float) -> Iterator[Offer]:
    """For each lag all (k, d) that cost at most φ + gap.

    For one d these are the k between the roots of cost·k² − τk + α = 0, with cost = price·G·d and τ = φ + gap − what d
    cuts off.
    """
    phi, cost = at_price(problem, lags, price)[1], price * problem.prices
    fixed = problem.weights[:lags, None] * problem.cut
    alpha = problem.alpha[:lags, None]
    tau = gap + phi[:, None] - fixed
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
        yield pruned(problem, lag, blocks, np.repeat(places, counts), price, float(phi[lag]))


def pruned(problem: Problem, lag: int, blocks: Floats, places: NDArray[np.intp], price: float, phi: float) -> Offer:
    """Without those that a narrower one is at least as good as."""
    value = problem.weights[lag] * problem.cut[places] + problem.alpha[lag] / blocks
    taken = blocks * problem.prices[places]
    order = np.lexsort((value, taken))
    before = np.minimum.accumulate(np.concatenate([[np.inf], value[order]]))[:-1]
    kept = order[value[order] < before]
    widths = np.round(taken[kept] / unit(problem)).astype(np.int64)
    return Offer(blocks[kept], places[kept], widths, np.maximum(value[kept] + price * taken[kept] - phi, 0.0))


@dataclass(frozen=True)
class Layer:
    """After some lags: what is paid above φ, by the width taken so far (from `low` on), and the last lag's choice."""

    low: int
    paid: Floats
    chosen: NDArray[np.int32]


def cheapest(offers: Sequence[Offer], question: Question, limit: float) -> Choice | None:
    """One offer per lag for the best number of lags, at most `limit` above its floor: what is paid above φ, plus what
    the width left over is worth, is least."""
    problem = question.problem
    room, price = problem.width // unit(problem), question.price * unit(problem)
    layers = [Layer(0, np.zeros(1), np.zeros(1, dtype=np.int32))]
    best, end = question.best * (1 - EQUAL), (0, 0)
    for lags, (offer, gap) in enumerate(zip(offers, question.gaps, strict=True), 1):
        layer = extended(layers[-1], offer, room, min(limit, gap)) if len(offer.blocks) else None
        if layer is None:
            break
        layers.append(layer)
        totals = question.floors[lags - 1] + layer.paid + price * (room - layer.low - np.arange(len(layer.paid)))
        if totals.min() < best:
            best, end = float(totals.min()), (lags, layer.low + int(totals.argmin()))
    return traced(layers[: end[0] + 1], offers, end[1]) if end[0] else None


def extended(layer: Layer, offer: Offer, room: int, gap: float) -> Layer | None:
    """One lag more: (min, +) convolution, cut to what fits and pays at most the gap."""
    least, n = int(offer.widths[0]), len(layer.paid)
    paid = np.full(n + int(offer.widths[-1]) - least, np.inf)
    chosen = np.zeros(len(paid), dtype=np.int32)
    for place, (width, above) in enumerate(zip(offer.widths, offer.above, strict=True)):
        part = slice(int(width) - least, int(width) - least + n)
        total = layer.paid + above
        lower = total < paid[part]
        paid[part] = np.where(lower, total, paid[part])
        chosen[part] = np.where(lower, place, chosen[part])
    low = layer.low + least
    alive = np.flatnonzero(paid[: max(0, room - low + 1)] <= gap)
    if len(alive) == 0:
        return None
    kept = slice(int(alive[0]), int(alive[-1]) + 1)
    return Layer(low + int(alive[0]), np.where(paid[kept] <= gap, paid[kept], np.inf), chosen[kept])


def traced(layers: Sequence[Layer], offers: Sequence[Offer], width: int) -> Choice:
    """Back from the width taken in the end, to what each lag chose."""
    blocks, places = [], []
    for layer, offer in zip(layers[:0:-1], offers[len(layers) - 2 :: -1], strict=True):
        pick = int(layer.chosen[width - layer.low])
        blocks.append(offer.blocks[pick])
        places.append(offer.places[pick])
        width -= int(offer.widths[pick])
    return Choice(np.array(blocks[::-1]), np.array(places[::-1], dtype=np.intp))
