"""How fast a head's softmax saturates: the slope of log-norm against log-length, and the verdict on it.

The design is balanced (every window gives the same rows), so the least-squares slope of all windows together is the
mean of the slopes of single windows, and their spread over windows gives its standard error. Rows of one window are
correlated, and do not count as independent. Every length has the same weight, whatever its number of rows.

| verdict | slope | meaning |
| --- | --- | --- |
| saturates | ≤ −¾ | the norm falls about like 1/L, as for weights spread over all tokens |
| partly | −¾ … −¼ | it falls more slowly: the weight stays on a share of the tokens that shrinks with length |
| flat | −¼ … ¼ | it stays: a few tokens keep the weight, however many others there are |
| grows | > ¼ | it rises with length |

For logits within a range R, p₁ ≤ e^R/L, and so the norm is O(1/L) **if R stays bounded**: the slope of R on log-length
is reported too. If that is near 1 or more, the bound e^R/L does not fall and implies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from deadweight.saturation.attention_rows import Column

SATURATES, FLAT, GROWS = -0.75, -0.25, 0.25
VERDICTS = ("saturates", "partly", "flat", "grows")
FEWEST = 3  # lengths that a slope needs
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class AtLength:
    """The rows of one head at one length: means, and three quantiles of the logarithm of the norm."""

    length: int
    rows: int
    norm: float
    log_norm: float
    log_norm_quantiles: tuple[float, ...]  # 0.1, 0.5, 0.9
    log_norm_rest: float  # of the softmax over all keys but the first
    logit_range: float
    entropy: float  # nats
    largest: float  # probability


@dataclass(frozen=True)
class Head:
    """One head by length, with the slopes of log-norm and of the logit range against log-length."""

    head: int
    slope: float | None  # None where it sees too few lengths
    error: float | None  # one standard error of the slope
    rest_slope: float | None  # of the norm without the first key
    range_slope: float | None  # growth of the logit range for each e-fold of the length
    by_length: tuple[AtLength, ...]

    @property
    def verdict(self) -> str:
        return verdict_of(self.slope)

    @property
    def sure(self) -> bool:
        """Whether the verdict is the same within two standard errors."""
        if self.slope is None or self.error is None:
            return False
        return len({verdict_of(self.slope + side * 2 * self.error) for side in (-1, 1)}) == 1


@dataclass(frozen=True)
class LayerSlopes:
    """The heads of one layer's attention."""

    path: str
    heads: tuple[Head, ...]

    @property
    def slope(self) -> float | None:
        """The mean over heads."""
        return mean_or_none([h.slope for h in self.heads])

    @property
    def rest_slope(self) -> float | None:
        return mean_or_none([h.rest_slope for h in self.heads])

    @property
    def range_slope(self) -> float | None:
        return mean_or_none([h.range_slope for h in self.heads])

    def mean(self, name: str, place: int = -1) -> float:
        """The mean over heads of a field of `AtLength`, at the longest length by default."""
        return math.fsum(getattr(h.by_length[place], name) for h in self.heads) / len(self.heads)

    def count(self, verdict: str) -> int:
        return sum(h.verdict == verdict for h in self.heads)


def verdict_of(slope: float | None) -> str:
    if slope is None:
        return "too short"
    bounds = (SATURATES, FLAT, GROWS)
    return VERDICTS[sum(slope > bound for bound in bounds)]


def mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def layer_of(path: str, by_length: dict[int, Float[Tensor, "windows heads rows columns"]]) -> LayerSlopes:
    """Means, quantiles and slopes of the rows of one attention; lengths without rows are left out."""
    full = {length: rows.double() for length, rows in by_length.items() if not bool(rows.isnan().all())}
    means = torch.stack([rows.nanmean(2) for rows in full.values()], 2)  # windows × heads × lengths × columns
    x = means[0, 0, :, Column.log_length]
    slope, error = fit_slopes(x, means[..., Column.log_norm])
    rest, growth = (fit_slopes(x, means[..., column])[0] for column in (Column.log_norm_rest, Column.logit_range))
    heads = range(means.shape[1])
    lengths = [tuple(at_length(length, rows[:, h]) for length, rows in full.items()) for h in heads]
    return LayerSlopes(path, tuple(Head(h, slope[h], error[h], rest[h], growth[h], lengths[h]) for h in heads))


def at_length(length: int, rows: Float[Tensor, "windows rows columns"]) -> AtLength:
    known = rows.flatten(0, 1)
    known = known[~known[:, 0].isnan()]
    levels = torch.tensor(QUANTILES, dtype=known.dtype)
    quantiles = torch.quantile(known[:, Column.log_norm], levels).tolist()
    means = {column.name: float(known[:, column].mean()) for column in Column if column is not Column.log_length}
    return AtLength(length=length, rows=len(known), log_norm_quantiles=tuple(quantiles), **means)


def fit_slopes(
    x: Float[Tensor, " lengths"], y: Float[Tensor, "windows heads lengths"]
) -> tuple[list[float | None], list[float | None]]:
    """The slope of y on x for every head, and its standard error from the spread over windows."""
    n_windows, n_heads, n_lengths = y.shape
    if n_lengths < FEWEST:
        return [None] * n_heads, [None] * n_heads
    away = x - x.mean()
    slopes = (y * away).sum(-1) / away.square().sum()
    return slopes.mean(0).tolist(), (slopes.std(0) / n_windows**0.5).tolist()


def factors(layers: Sequence[LayerSlopes], *, decay: float = 25.0, least: float = 0.125) -> tuple[float, ...]:
    """For each layer the share of a token's dimensions that its heads need, in [least, 1]: input of `allocate plan`.

    To first order, an error δ in a row's logits changes its weights by at most ‖J‖·‖δ‖. Keep a share s of a head's
    query-key dimensions, largest singular values first, and suppose that these fall geometrically, by `decay` from the
    first to the last (11 to 69 in SmolLM2-135M after the first layer). Then the part that is cut off has size
    decay^(−s), and its effect is at most N_l · decay^(−s), with N_l the mean norm of the layer's rows at the longest
    length. The same effect in all layers, with s = 1 where N_l is largest, gives

        s_l = 1 − log(max N / N_l) / log(decay).

    The effects of heads add up, so N_l is the plain mean over heads: a few that do not saturate keep the layer large.
    This compares layers. It proves nothing about a single one, since ‖δ‖ over L logits may grow as fast as ‖J‖ falls.
    """
    norms = [max(layer.mean("norm"), 1e-300) for layer in layers]
    return tuple(max(least, 1 - math.log(max(norms) / n) / math.log(decay)) for n in norms)
