"""A transformer layer by layer: heads and their size, at the attention parameters of equal heads everywhere.

Every layer has one d_qk and one d_v, so its heads are of one size. Layer l comes with a factor s_l in (0, 1], its
*saturation*: the share of a token's dimensions that its heads can still use. Early layers have 1 and take their shape
from the bound. A later layer has as many heads, of s_l times the size (rounded up to what the rules allow), and its
bound is that of tokens of s_l·d numbers. The width that this saves pays for more heads in all layers. A rest too small
for one more head in every layer goes to the layers where it lowers the sum of the bounds most.

Of all head sizes that the rules allow, the plan uses the one with the smallest sum of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from deadweight.allocate.bound import HeadGroup, Task, error
from deadweight.allocate.constraints import Rules, kv_bytes
from deadweight.allocate.solver import split
from deadweight.errors import DeadweightError

FURTHER = 2  # additional groups of heads that single layers may have, to use the rest of the budget


@dataclass(frozen=True)
class UniformShape:
    """A transformer with equal heads in all layers: the one that a plan replaces."""

    d_model: int
    n_layers: int
    heads: int
    context: int = 256

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "heads", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise DeadweightError(f"found {name} = {value!r}; expected a whole number above zero")
        if self.d_model % self.heads:
            raise DeadweightError(f"found {self.heads} heads for d_model = {self.d_model}; expected a divisor of it")

    @property
    def size(self) -> int:
        return self.d_model // self.heads

    @property
    def width(self) -> int:
        """Σ heads × size over all layers."""
        return self.d_model * self.n_layers


@dataclass(frozen=True)
class PlannedLayer:
    """One layer, and its error bound with the best distribution of its heads over lags."""

    heads: int
    size: int
    groups: tuple[HeadGroup, ...]
    error: float

    @property
    def width(self) -> int:
        return self.heads * self.size


@dataclass(frozen=True)
class HeadPlan:
    """All layers, and those with equal heads for comparison."""

    shape: UniformShape
    rules: Rules
    d_token: int
    saturation: tuple[float, ...]
    layers: tuple[PlannedLayer, ...]
    default: tuple[PlannedLayer, ...]

    def parameters(self, layer: PlannedLayer) -> int:
        """Parameters of the four projections."""
        return 2 * self.shape.d_model * (layer.width + layer.width // self.rules.sharing)

    def kv_bytes(self, layer: PlannedLayer) -> int:
        """Bytes of the key-value cache per token, at two bytes per number."""
        return int(kv_bytes(layer.width, self.rules))


def plan(
    shape: UniformShape,
    profile: Sequence[float],
    *,
    d_token: int | None = None,
    saturation: Sequence[float] | None = None,
    rules: Rules | None = None,
) -> HeadPlan:
    """Heads and sizes by layer. Default: `d_token` is the head dimension of `shape`, saturation factors are 1."""
    rules, d_token = rules or Rules(multiple=8), d_token or shape.size
    factors = check_saturation(saturation if saturation is not None else [1.0] * shape.n_layers, shape)
    if shape.heads % rules.sharing:
        raise DeadweightError(
            f"found {shape.heads} heads with {rules.sharing} per key head; expected a multiple of {rules.sharing}"
        )
    tasks = [Task(tuple(profile), max(1, round(s * d_token))) for s in factors]
    candidates = [candidate(shape, tasks, factors, size, rules) for size in rules.sizes(Task(tuple(profile), d_token))]
    fitting = [layers for layers in candidates if layers is not None]
    if not fitting:
        need = shape.n_layers * rules.least
        raise DeadweightError(
            f"found a Σ heads × size of {shape.width:,} for all layers; expected {need:,} or more for one group of "
            f"{rules.sharing} heads of size {rules.multiple} in each: the nearest feasible d_model is {rules.least}"
        )
    best = min(fitting, key=lambda layers: sum(layer.error for layer in layers))
    default = [plan_layer(task, shape.heads, shape.size, rules.sharing) for task in tasks]
    return HeadPlan(shape, rules, d_token, factors, tuple(best), tuple(default))


def check_saturation(factors: Sequence[float], shape: UniformShape) -> tuple[float, ...]:
    result = tuple(float(f) for f in factors)
    if len(result) != shape.n_layers:
        raise DeadweightError(f"found {len(result)} saturation factors for {shape.n_layers} layers; expected one each")
    for layer, factor in enumerate(result):
        if not 0 < factor <= 1:
            raise DeadweightError(f"found a saturation factor of {factor!r} at layer {layer}; expected 0 < factor ≤ 1")
    return result


@lru_cache(maxsize=4096)  # layers of equal shape are planned once
def plan_layer(task: Task, heads: int, size: int, sharing: int) -> PlannedLayer:
    groups = split(task, heads, size, sharing)
    return PlannedLayer(heads, size, groups, error(task, groups))


def candidate(
    shape: UniformShape, tasks: Sequence[Task], factors: Sequence[float], size: int, rules: Rules
) -> list[PlannedLayer] | None:
    """Heads of this size in early layers, smaller ones later, as many in each layer as fit; None if not one does."""
    sizes = [rules.multiple * max(1, math.ceil(s * size / rules.multiple - 1e-9)) for s in factors]
    blocks = shape.width // (rules.sharing * sum(sizes))
    if blocks == 0:
        return None
    left = shape.width - blocks * rules.sharing * sum(sizes)
    choices = [
        [plan_layer(task, (blocks + more) * rules.sharing, d, rules.sharing) for more in range(FURTHER + 1)]
        for task, d in zip(tasks, sizes, strict=True)
    ]
    return fill_budget(choices, left)


def fill_budget(choices: Sequence[Sequence[PlannedLayer]], left: int) -> list[PlannedLayer]:
    """One choice per layer: the one with the smallest sum of bounds among those that use most of the rest."""
    ways: dict[int, tuple[float, list[PlannedLayer]]] = {0: (0.0, [])}
    for layer in choices:
        longer: dict[int, tuple[float, list[PlannedLayer]]] = {}
        for used, (total, chosen) in ways.items():
            for choice in layer:
                width = used + choice.width - layer[0].width
                if width <= left and total + choice.error < longer.get(width, (math.inf,))[0]:
                    longer[width] = total + choice.error, [*chosen, choice]
        ways = longer
    return ways[max(ways)][1]
