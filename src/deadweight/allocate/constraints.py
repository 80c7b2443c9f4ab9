"""The constraints of a design: budgets, and rules for the sizes of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deadweight.allocate.bound import Task
from deadweight.errors import DeadweightError


@dataclass(frozen=True)
class Rules:
    """Rules for the heads of a layer.

    Query heads that share a key-value head attend to the same lag. The bound allows that: its heads of one lag differ
    in their attention, not in their values.
    """

    multiple: int = 1  # head sizes are multiples of this
    one_size: bool = False  # all heads of the layer have one size, as in any model with one d_qk and one d_v per layer
    sharing: int = 1  # query heads per key-value head; the number of heads of every lag is a multiple of this
    lags: int | None = None  # number of lags with heads; None: the best number

    def __post_init__(self) -> None:
        for name in ("multiple", "sharing", "lags"):
            value = getattr(self, name)
            if not (name == "lags" and value is None) and (not isinstance(value, int) or value < 1):
                raise DeadweightError(f"found {name} = {value!r}; expected a whole number above zero")

    def sizes(self, task: Task) -> list[int]:
        """The head sizes to try, up to the first that is as large as a token; larger ones cannot lower the bound."""
        steps = -(-task.d_token // self.multiple)
        return [self.multiple * i for i in range(1, steps + 1)]

    @property
    def least(self) -> int:
        """The width of the narrowest group of heads."""
        return self.multiple * self.sharing


@dataclass(frozen=True)
class LayerBudget:
    """What a layer may cost. Every limit is proportional to Σ heads × size, so the tightest one decides.

    Parameters are proportional to that sum, and so are the cache, 2·Σ H·d/sharing numbers per token, and the
    multiplications per token, 2·(d_model·(1 + 1/sharing) + context)·Σ H·d of two FLOPs each (the softmax itself is
    not counted).
    """

    width: int  # D
    kv_bytes: float | None = None  # per token
    flops: float | None = None  # per token
    d_model: int = 0  # for FLOPs: width of the residual stream
    context: int = 0  # for FLOPs: tokens that a token attends to
    bytes_per_number: int = 2

    def __post_init__(self) -> None:
        for name in ("width", "kv_bytes", "flops"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise DeadweightError(f"found {name} = {value!r}; expected a number")
        if self.flops is not None and self.d_model < 1:
            raise DeadweightError(
                "found a FLOP budget without d_model; expected the width of the residual stream (--width)"
            )

    def limits(self, rules: Rules) -> Iterator[WidthLimit]:
        yield WidthLimit("budget D", self.width, 1.0)
        if self.kv_bytes is not None:
            yield WidthLimit(
                "cache budget in bytes per token", self.kv_bytes, kv_bytes(1, rules, self.bytes_per_number)
            )
        if self.flops is not None:
            yield WidthLimit("FLOP budget per token", self.flops, flops(1, rules, self.d_model, self.context))

    def tightest(self, rules: Rules) -> WidthLimit:
        return min(self.limits(rules), key=lambda limit: limit.width)


def kv_bytes(width: int, rules: Rules, bytes_per_number: int = 2) -> float:
    """Bytes of the keys and values of one token."""
    return 2 * width / rules.sharing * bytes_per_number


def flops(width: int, rules: Rules, d_model: int, context: int) -> float:
    """FLOPs of one token that attends to `context` others: four projections, scores, and the sum of values."""
    return 4 * width * (d_model * (1 + 1 / rules.sharing) + context)


@dataclass(frozen=True)
class WidthLimit:
    """One budget, and how much of it a unit of Σ heads × size takes."""

    name: str
    value: float
    per_unit: float

    @property
    def width(self) -> int:
        return int(self.value / self.per_unit + 1e-9)


def feasible(task: Task, budget: LayerBudget, rules: Rules) -> WidthLimit:
    """The tightest limit. If nothing fits, an error names it and the nearest feasible one."""
    lags = rules.lags or 1
    if lags > len(task.profile):
        raise DeadweightError(f"found lags = {lags}; expected at most the {len(task.profile)} lags of the profile")
    limit, need = budget.tightest(rules), lags * rules.least
    if limit.width < need:
        raise DeadweightError(
            f"found a {limit.name} of {limit.value:,g}, room for a Σ heads × size of {limit.width:,}; expected "
            f"{need:,} or more for {needs(lags, rules)}: the nearest feasible {limit.name} is {nearest(need, limit)}"
        )
    return limit


def needs(lags: int, rules: Rules) -> str:
    heads = f"{rules.sharing} heads that share keys" if rules.sharing > 1 else "1 head"
    return f"{lags} lag{'s' if lags > 1 else ''} with {heads} of size {rules.multiple}"


def nearest(need: int, limit: WidthLimit) -> str:
    value = need * limit.per_unit
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
