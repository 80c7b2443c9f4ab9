"""Carrying a plan out: a few weights at a time, each released as soon as no later rewrite needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import Lazy, pieces
from deadweight.reduce.plan import Skipped
from deadweight.rewrite.effect import NotFollowed
from deadweight.rewrite.known import Known
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.save.facts import Fact, module_of
from deadweight.source.text import printable

Read = Callable[[str], Tensor]  # a weight by its state-dict name, in its own precision
Scale = Callable[[str, Tensor, Tensor], Any]  # what becomes of a stored weight and the factor it is multiplied by


class Weights(Tensors):
    """Weights in float64, read when first asked for; what was changed is kept until it is released."""

    def __init__(self, read: Read, *, scaled: Scale | None = None) -> None:
        self.read, self.scaled = read, scaled
        self.open: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        self.final: set[str] = set()  # weights that no later rewrite reads

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.open:
            self.open[name] = checked(name, self.read(name)).to(torch.float64, copy=True)  # rewrites may work in it
        return self.open[name]

    def scale(self, name: str, axis: int, factor: Tensor) -> None:
        """Multiply along an axis; a final weight in the way that was asked for, which need not hold it in float64."""
        if self.scaled is None or name in self.open or name not in self.final:
            value = self[name]
            self[name] = value * along(factor, axis, value.ndim)
            return
        stored = checked(name, self.read(name))
        self[name] = self.scaled(name, stored, along(factor, axis, stored.ndim))

    def __setitem__(self, name: str, value: Any) -> None:
        self.open[name] = value
        self.changed.add(name)

    def __delitem__(self, name: str) -> None:
        del self.open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.open)

    def __len__(self) -> int:
        return len(self.open)


def rounding(precision: Callable[[str], torch.dtype]) -> Scale:
    """Scale weights that nobody needs in float64 any more: they are rounded at once."""
    return lambda name, stored, factor: Scaled(product(stored, factor, precision(name)), factor)


def product(stored: Tensor, factor: Tensor, target: torch.dtype) -> Tensor:
    """A weight times a factor, as if computed in float64 and rounded to the target precision."""
    short = factor.to(target)
    if torch.equal(short.to(torch.float64), factor):  # both fit into the target: one product there is rounded once
        return stored.to(target) * short
    result, start = torch.empty_like(stored, dtype=target), 0
    for piece in pieces(Lazy(stored, factor)):
        result[start : start + len(piece)] = piece
        start += len(piece)
    return result


def along(factor: Tensor, axis: int, rank: int) -> Tensor:
    """A factor per index of one axis, shaped to be multiplied."""
    return factor.reshape([-1 if a == axis else 1 for a in range(rank)])


def checked(name: str, tensor: Tensor) -> Tensor:
    """The tensor, refused if a number in it is not finite."""
    if tensor.is_floating_point() and tensor.numel() and not all_finite(tensor):
        raise DeadweightError(
            f"{printable(name)} holds NaN or infinite numbers; nothing can be said about such a model: repair it first"
        )
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """One pass: the smallest and the largest number are finite, and NaN would be both."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


@dataclass(frozen=True)
class Outcome:
    """What came of one rewrite: facts, or the reason why it was left out."""

    rewrite: Rewrite
    facts: tuple[Fact, ...] = ()
    skipped: Skipped | None = None


@dataclass
class Applied:
    """What came of a plan, or of a part of it: outcomes by their place in the plan, in whatever order they came."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Outcome]:
        return (self.outcomes[place] for place in sorted(self.outcomes))

    @property
    def facts(self) -> list[Fact]:
        return [fact for outcome in self for fact in outcome.facts]

    @property
    def done(self) -> list[Rewrite]:
        return [outcome.rewrite for outcome in self if outcome.skipped is None]

    @property
    def skipped(self) -> list[Skipped]:
        return [outcome.skipped for outcome in self if outcome.skipped is not None]

    def at(self, places: Iterable[int]) -> Applied:
        """Of a part of the plan."""
        return Applied({place: self.outcomes[place] for place in places})


Group = dict[int, Rewrite]  # rewrites by their place in the plan, in its order


def independent(rewrites: Group) -> list[Group]:
    """The plan in parts that have no module in common: what is done in one part means nothing to another."""
    parts: dict[int, Group] = {}
    part_of: dict[str, int] = {}  # module to part
    for place, rewrite in rewrites.items():
        modules = {module_of(name) for name in rewrite.touches}
        met = sorted({part_of[m] for m in modules if m in part_of})
        first = met[0] if met else place
        mine = parts.setdefault(first, {})
        for other in met[1:]:
            mine |= parts.pop(other)
        mine[place] = rewrite
        part_of |= {m: first for m, part in part_of.items() if part in met[1:]}
        part_of |= dict.fromkeys(modules, first)
    return [dict(sorted(part.items())) for _, part in sorted(parts.items())]


def apply(
    group: Group,
    weights: Weights,
    applied: Applied,
    *,
    started: Callable[[Rewrite], None] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Do rewrites in order, giving out every weight once it is final: its float64 value, or None if unchanged."""
    last = {name: n for n, r in group.items() for name in r.touches}
    known = Known()
    for n, rewrite in group.items():
        if started is not None:
            started(rewrite)
        touches = rewrite.touches
        weights.final = {name for name in touches if last[name] == n}
        applied.outcomes[n] = outcome = one(rewrite, weights, known)
        known = known.and_also(outcome.facts)
        for name in touches:
            if last[name] == n:
                value = weights.open.pop(name, None)
                yield name, value if name in weights.changed else None
                weights.changed.discard(name)


def one(rewrite: Rewrite, weights: Weights, known: Known) -> Outcome:
    """Do one rewrite, or note why it is left out; a rewrite that fails leaves no trace."""
    touches = rewrite.touches
    before = {name: weights.open[name] for name in touches if name in weights.open}
    changed = set(weights.changed)
    try:
        return Outcome(rewrite, tuple(rewrite.apply(weights, known)))
    except (NotDone, NotFollowed) as reason:
        for name in touches:
            weights.open.pop(name, None)
        weights.open.update(before)
        weights.changed = changed
        claim = rewrite.claim
        return Outcome(rewrite, (), Skipped(claim.code, claim.name, rewrite.target, str(reason), claim.dof))


@dataclass(frozen=True)
class Scaled:
    """A weight that was only multiplied by a factor: rounded as it will be stored, and the factor by itself."""

    rounded: Tensor
    factor: Tensor  # broadcasts against the weight
