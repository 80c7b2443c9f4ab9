"""Applying a plan: a few weights at a time, each released as soon as no later rewrite needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import Lazy, pieces
from deadweight.reduce.plan import Skipped
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.rewrite.shift_effect import NotFollowed
from deadweight.save.facts import Fact, module_of
from deadweight.source.checkpoint import FLOATS
from deadweight.source.printable import printable


@dataclass(frozen=True)
class ScaledWeight:
    """A weight that was only multiplied by a factor: rounded as it will be stored, and the factor by itself."""

    rounded: Tensor
    factor: Tensor  # broadcasts against the weight


FinalWeight = Tensor | ScaledWeight  # a weight that no later rewrite changes; tensors are in float64
Read = Callable[[str], Tensor]  # a weight by its state-dict name, in its own precision
Scale = Callable[[str, Tensor, Tensor], ScaledWeight]  # of a name, the stored weight and a factor


class Weights(Tensors):
    """Weights in float64, each read when first used; changed ones are kept until they are released.

    With `scale_final`, a final weight that is only multiplied by a factor is not held in float64.
    """

    def __init__(self, read: Read, *, scale_final: Scale | None = None) -> None:
        self.read, self.scale_final = read, scale_final
        self.open: dict[str, Tensor] = {}
        self.scaled: dict[str, ScaledWeight] = {}
        self.changed: set[str] = set()
        self.final: set[str] = set()  # weights that no later rewrite reads

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.open:
            self.open[name] = require_finite(name, self.read(name)).to(
                torch.float64, copy=True
            )  # rewrites may work in it
        return self.open[name]

    def scale(self, name: str, axis: int, factor: Tensor) -> None:
        """Multiply a weight along an axis; a final one by `scale_final`."""
        if self.scale_final is None or name in self.open or name not in self.final:
            value = self[name]
            self[name] = value * along(factor, axis, value.ndim)
            return
        stored = require_finite(name, self.read(name))
        self.scaled[name] = self.scale_final(name, stored, along(factor, axis, stored.ndim))

    def release(self, name: str) -> FinalWeight | None:
        """Forget a weight and return its final value; None if nothing has changed it."""
        scaled, value, changed = self.scaled.pop(name, None), self.open.pop(name, None), name in self.changed
        self.changed.discard(name)
        return scaled if scaled is not None else value if changed else None

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.open[name] = value
        self.changed.add(name)

    def __delitem__(self, name: str) -> None:
        del self.open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.open)

    def __len__(self) -> int:
        return len(self.open)


def scale_and_round(precision: Callable[[str], torch.dtype]) -> Scale:
    """Scale final weights and round them at once to the precision in which they are stored."""
    return lambda name, stored, factor: ScaledWeight(product(stored, factor, precision(name)), factor)


def product(stored: Tensor, factor: Tensor, target: torch.dtype) -> Tensor:
    """A weight times a factor, as if computed in float64 and rounded to the target precision."""
    short = factor.to(target)
    if torch.equal(short.to(torch.float64), factor):  # the factor is exact in the target: one product there rounds once
        return stored.to(target) * short
    result, start = torch.empty_like(stored, dtype=target), 0
    for piece in pieces(Lazy(stored, factor)):
        result[start : start + len(piece)] = piece
        start += len(piece)
    return result


def along(factor: Tensor, axis: int, rank: int) -> Tensor:
    """A factor per index of one axis, shaped to be multiplied."""
    return factor.reshape([-1 if a == axis else 1 for a in range(rank)])


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """The tensor; raises if it holds NaN or infinity. Formats that no weight of a model may have are not looked at."""
    if tensor.dtype in FLOATS and tensor.numel() and not all_finite(tensor):
        raise DeadweightError(
            f"{printable(name)} holds NaN or infinity; expected finite numbers: repair the checkpoint first"
        )
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """In one pass: the minimum and the maximum are finite; NaN would be both."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


@dataclass(frozen=True)
class RewriteResult:
    """The result of one rewrite: facts, or the reason why it was left out."""

    rewrite: Rewrite
    facts: tuple[Fact, ...] = ()
    skipped: Skipped | None = None


@dataclass
class Applied:
    """The results of a plan, or of a part of it, by the position of each rewrite in the plan."""

    results: dict[int, RewriteResult] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RewriteResult]:
        return (self.results[position] for position in sorted(self.results))

    @property
    def facts(self) -> list[Fact]:
        return [fact for result in self for fact in result.facts]

    @property
    def done(self) -> list[Rewrite]:
        return [result.rewrite for result in self if result.skipped is None]

    @property
    def skipped(self) -> list[Skipped]:
        return [result.skipped for result in self if result.skipped is not None]

    def at(self, positions: Iterable[int]) -> Applied:
        """The results of a part of the plan."""
        return Applied({position: self.results[position] for position in positions})


Rewrites = dict[int, Rewrite]  # by their position in the plan, in its order


def independent(rewrites: Rewrites) -> list[Rewrites]:
    """The plan in parts that have no module in common, so that they can be applied in any order."""
    parts: dict[int, Rewrites] = {}
    part_of: dict[str, int] = {}  # module to part
    for position, rewrite in rewrites.items():
        modules = {module_of(name) for name in rewrite.touches}
        met = sorted({part_of[m] for m in modules if m in part_of})
        first = met[0] if met else position
        mine = parts.setdefault(first, {})
        for other in met[1:]:
            mine |= parts.pop(other)
        mine[position] = rewrite
        part_of |= {m: first for m, part in part_of.items() if part in met[1:]}
        part_of |= dict.fromkeys(modules, first)
    return [dict(sorted(part.items())) for _, part in sorted(parts.items())]


def apply(
    rewrites: Rewrites,
    weights: Weights,
    applied: Applied,
    *,
    started: Callable[[Rewrite], None] | None = None,
) -> Iterator[tuple[str, FinalWeight | None]]:
    """Apply rewrites in order, and yield every weight as soon as it is final: its value, or None if unchanged."""
    last = {name: n for n, r in rewrites.items() for name in r.touches}
    known = SettledFacts()
    for n, rewrite in rewrites.items():
        if started is not None:
            started(rewrite)
        touches = rewrite.touches
        weights.final = {name for name in touches if last[name] == n}
        applied.results[n] = result = apply_one(rewrite, weights, known)
        known = known.and_also(result.facts)
        for name in touches:
            if last[name] == n:
                yield name, weights.release(name)


def apply_one(rewrite: Rewrite, weights: Weights, known: SettledFacts) -> RewriteResult:
    """Apply one rewrite, or note why it is left out; a rewrite that fails changes no weight."""
    touches = rewrite.touches
    before = {name: weights.open[name] for name in touches if name in weights.open}
    changed = set(weights.changed)
    try:
        return RewriteResult(rewrite, tuple(rewrite.apply(weights, known)))
    except (NotDone, NotFollowed) as reason:
        for name in touches:
            weights.open.pop(name, None)
            weights.scaled.pop(name, None)
        weights.open.update(before)
        weights.changed = changed
        claim = rewrite.claim
        return RewriteResult(rewrite, (), Skipped(claim.code, claim.name, rewrite.target, str(reason), claim.dof))
