"""Carrying a plan out: a few weights at a time, each released as soon as no later rewrite needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import Lazy, pieces
from deadweight.reduce.effect import NotFollowed
from deadweight.reduce.facts import Fact
from deadweight.reduce.plan import Skipped
from deadweight.reduce.rewrite import NotDone, Rewrite, Tensors
from deadweight.source.text import printable

Read = Callable[[str], Tensor]  # a weight by its state-dict name, in its own precision
Scaled = Callable[[str, Tensor, Tensor], Any]  # what becomes of a stored weight and the factor it is multiplied by


class Weights(Tensors):
    """Weights in float64, read when first asked for; what was changed is kept until it is released."""

    def __init__(self, read: Read, *, scaled: Scaled | None = None) -> None:
        self.read, self.scaled = read, scaled
        self.open: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        self.final: set[str] = set()  # weights that no later rewrite reads

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.open:
            self.open[name] = checked(name, self.read(name)).to(torch.float64)
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


CHUNK = 1 << 20  # elements worked on at a time


def rounded(precision: Callable[[str], torch.dtype]) -> Scaled:
    """The product in float64, rounded a few rows at a time to the precision in which the weight will be stored."""

    def scaled(name: str, stored: Tensor, factor: Tensor) -> Tensor:
        result, start = torch.empty_like(stored, dtype=precision(name)), 0
        for piece in pieces(Lazy(stored, factor), CHUNK):
            result[start : start + len(piece)] = piece
            start += len(piece)
        return result

    return scaled


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


@dataclass
class Applied:
    """What came of a plan."""

    facts: list[Fact] = field(default_factory=list)
    done: list[Rewrite] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def apply(
    rewrites: Sequence[Rewrite],
    weights: Weights,
    applied: Applied,
    *,
    started: Callable[[Rewrite], None] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Do the rewrites in order, giving out every weight once it is final: its float64 value, or None if unchanged."""
    for rewrite in rewrites[:1]:
        rewrite.notes.clear()
    last = {name: n for n, r in enumerate(rewrites) for name in r.touches}
    for n, rewrite in enumerate(rewrites):
        if started is not None:
            started(rewrite)
        weights.final = {name for name in rewrite.touches if last[name] == n}
        one(rewrite, weights, applied)
        for name in rewrite.touches:
            if last[name] == n:
                value = weights.open.pop(name, None)
                yield name, value if name in weights.changed else None
                weights.changed.discard(name)


def one(rewrite: Rewrite, weights: Weights, applied: Applied) -> None:
    """Do one rewrite, or note why it is left out; a rewrite that fails leaves no trace."""
    before = {name: weights.open[name] for name in rewrite.touches if name in weights.open}
    changed = set(weights.changed)
    try:
        facts = rewrite.apply(weights)
    except (NotDone, NotFollowed) as reason:
        for name in rewrite.touches:
            weights.open.pop(name, None)
        weights.open.update(before)
        weights.changed = changed
        claim = rewrite.claim
        applied.skipped.append(Skipped(claim.code, claim.name, rewrite.target, str(reason), claim.dof))
        return
    applied.facts.extend(facts)
    applied.done.append(rewrite)
