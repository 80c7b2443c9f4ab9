"""Claims about maps of one value whose results are added, and the motions of parameters they stand for.

A claim's parameter may move at will: what its map then does differently, the host's weight undoes. Both are measured by
running the maps on impulses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from deadweight.claims.claim import Claim, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.claims.shift_claim import FAR
from deadweight.proof.affine_maps import Window

Response = tuple[Tensor, Tensor]  # M, in the layout of the host's weight, and the constant, by channel


@dataclass(frozen=True)
class Term:
    """One summand: `factor` times a node's value."""

    node: str
    factor: float
    sums: tuple[str, ...] = ()  # the partial sums between the node and the whole sum


@dataclass(frozen=True)
class Impulses(ABC):
    """Inputs on which a map of `value` shows its matrix."""

    value: str

    @abstractmethod
    def matrix(self, point: Point, node: str, *, few: bool = False) -> Response:
        """What `node` does: its matrix in the layout of the host's weight, or as few columns of it as show the scale
        of every output channel; and its constant."""

    def run(self, point: Point, node: str, impulses: Tensor) -> Tensor:
        return torch.as_tensor(point.computed(node, {self.value: impulses}))


@dataclass(frozen=True)
class DenseImpulses(Impulses):
    """Unit vectors along the last axis."""

    width: int

    def matrix(self, point: Point, node: str, *, few: bool = False) -> Response:
        units = torch.eye(1 if few else self.width, self.width, dtype=torch.float64)
        constant = self.run(point, node, torch.zeros_like(units[:1])).reshape(-1)
        return (self.run(point, node, units).reshape(len(units), -1) - constant).mT, constant


@dataclass(frozen=True)
class WindowImpulses(Impulses):
    """A one in one channel at one tap of the window, for every channel and tap; read at one place of the output."""

    channels: int
    window: Window

    def matrix(self, point: Point, node: str, *, few: bool = False) -> Response:
        w = self.window
        place = [-(-p // s) for p, s in zip(w.padding, w.stride, strict=True)]  # the first without padding
        first = [s * o - p for s, o, p in zip(w.stride, place, w.padding, strict=True)]
        size = [f + d * (k - 1) + 1 for f, d, k in zip(first, w.dilation, w.kernel, strict=True)]
        groups, own = w.groups, self.channels // w.groups  # every group reads its own channels: all are tried at once
        taps = list(product(*map(range, w.kernel)))[: 1 if few else None]
        own = 1 if few else own
        impulses = torch.zeros(own * len(taps) + 1, groups, self.channels // groups, *size, dtype=torch.float64)
        for number, (channel, tap) in enumerate((c, t) for c in range(own) for t in taps):
            at = tuple(f + d * t for f, d, t in zip(first, w.dilation, tap, strict=True))
            impulses[number, :, channel].view(groups, -1)[:, flat_place(at, size)] = 1.0
        out = self.run(point, node, impulses.flatten(1, 2))
        for index in reversed(place):
            out = out[..., index]  # impulses × output channels
        kernel = (1,) * len(size) if few else w.kernel
        return (out[:-1] - out[-1]).mT.reshape(-1, own, *kernel), out[-1]


def flat_place(at: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a place in a box, counted row by row."""
    number = 0
    for index, size in zip(at, sizes, strict=True):
        number = number * size + index
    return number


@dataclass(frozen=True)
class RowImpulses(Impulses):
    """Every index, in the shape of the model's own indices."""

    rows: int
    shape: tuple[int, ...]  # of the model's indices

    def matrix(self, point: Point, node: str, *, few: bool = False) -> Response:
        size = prod(self.shape)
        rows = []
        for start in range(0, 1 if few else self.rows, size):
            index = (torch.arange(start, start + size) % self.rows).reshape(self.shape)
            rows.append(self.run(point, node, index).reshape(size, -1))
        matrix = torch.cat(rows)[: 1 if few else self.rows]
        return matrix, torch.zeros_like(matrix[0])


@dataclass(frozen=True)
class Host:
    """A weight that is a full map of the value, read nowhere else; `view` is the weight as the operation reads it."""

    parameter: str
    view: str
    product: str
    term: Term
    impulses: Impulses
    nodes: tuple[str, ...]  # from the parameter to the term

    def undo(self, point: Point, change: Tensor) -> Motion:
        """The motion of the parameter that takes `change` away from the sum."""
        stored = point.values[self.parameter]
        ones, zeros = (point.at({self.parameter: torch.full(stored.shape, x, dtype=torch.float64)}) for x in (1.0, 0.0))
        scale = self.scale(ones) - self.scale(zeros)
        return self.stored(point, self.view, -change / (self.term.factor * scale))

    def scale(self, point: Point) -> Tensor:
        """What an entry of the weight is multiplied by, by output channel."""
        return self.impulses.matrix(point, self.term.node, few=True)[0]

    def stored(self, point: Point, view: str, change: Tensor) -> Motion:
        """A change of the weight as it is read, as a change of the weight as it is stored; rows beyond it stay."""
        shape = point.graph.nodes[self.parameter].shape
        numbers = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
        places = torch.as_tensor(point.computed(view, {self.parameter: numbers}))[: len(change)].long()
        motion = torch.zeros(prod(shape), dtype=torch.float64)
        motion[places.reshape(-1)] = change.reshape(-1)
        return {self.parameter: motion.reshape(shape)}


@dataclass(frozen=True)
class Offset:
    """A bias among the summands, one number per channel."""

    parameter: str
    term: Term
    nodes: tuple[str, ...]

    def undo(self, point: Point, change: Tensor) -> Motion:
        shape = point.graph.nodes[self.parameter].shape
        numbers = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
        places = torch.as_tensor(point.computed(self.term.node, {self.parameter: numbers})).reshape(-1).long()
        motion = torch.zeros(prod(shape), dtype=torch.float64)
        motion[places] = -change / self.term.factor
        return {self.parameter: motion.reshape(shape)}


@dataclass(frozen=True, kw_only=True)
class ParallelClaim(Claim):
    """The parameter of one summand moves at will; the host, and a bias where the constant changes, undo it."""

    guest: Term
    host: Host
    offset: Offset | None = None

    def motions(self, point: Point) -> Iterator[Motion]:
        shape = point.graph.nodes[self.node].shape
        for unit in torch.eye(prod(shape), dtype=torch.float64):
            yield self.along(point, unit.reshape(shape))

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        return self.along(point, normal(generator, *point.graph.nodes[self.node].shape))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """A long way in any direction."""
        before = point.values[self.node].to(torch.float64)
        after = before + FAR * normal(generator, *before.shape)
        was, now = self.response(point), self.response(point.at({self.node: after}))
        undone = self.undo(point, now[0] - was[0], now[1] - was[1])
        return {self.node: after, **{n: point.values[n] + t for n, t in undone.items()}}

    def along(self, point: Point, tangent: Tensor) -> Motion:
        with forward_ad.dual_level():
            value = point.values[self.node].to(torch.float64)
            moving = self.response(point.at({self.node: forward_ad.make_dual(value, tangent)}))
            change, constant = (moved_by(part) for part in moving)
        return {self.node: tangent, **self.undo(point, change, constant)}

    def response(self, point: Point) -> Response:
        return self.host.impulses.matrix(point, self.guest.node)

    def undo(self, point: Point, change: Tensor, constant: Tensor) -> Motion:
        motion = self.host.undo(point, self.guest.factor * change)
        return motion | ({} if self.offset is None else self.offset.undo(point, self.guest.factor * constant))


def moved_by(value: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if tangent is None else tangent
