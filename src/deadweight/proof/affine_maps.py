"""Which values are affine in another value, place by place: what a weight of its own could compute in their stead.

`DenseMaps` act on the last axis, `ConvolutionMaps` on the channels and a window around each place, `RowMaps` on single
indices: any function of an index is linear in the index's unit vector. Whatever is not on the lists is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from deadweight.graph.node import Argument, Graph, Node, Ref
from deadweight.proof.operation_groups import POINTWISE

WINDOWS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
ARITHMETIC = {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg"}
ROW_CORES = ("core.layer", "core.rms", "core.unit")
Operands = frozenset[str]


@dataclass(frozen=True)
class AffineMap:
    """M(θ)·v + c(θ), for the operands θ that depend on no data."""

    nodes: Operands = frozenset()  # between v and the result, which is one of them
    factors: Operands = frozenset()  # operands that M depends on
    offsets: Operands = frozenset()  # operands that are added
    lifted: Operands = frozenset()  # factors that c depends on as well
    windowed: bool = False  # whether a convolution with a window, or a stride, is on every way

    def after(self, node: Node) -> AffineMap:
        return replace(self, nodes=self.nodes | {node.name})

    def times(self, operand: Argument) -> AffineMap:
        """With one factor more; it multiplies what has been added so far."""
        names = frozenset({operand.name} if isinstance(operand, Ref) else ())
        return replace(self, factors=self.factors | names, lifted=self.lifted | (names if self.constant else set()))

    def plus(self, operand: Argument) -> AffineMap:
        return replace(self, offsets=self.offsets | {operand.name if isinstance(operand, Ref) else repr(operand)})

    @property
    def constant(self) -> bool:
        """Whether anything has been added."""
        return bool(self.offsets)

    def added_to(self, other: AffineMap) -> AffineMap:
        return AffineMap(
            self.nodes | other.nodes,
            self.factors | other.factors,
            self.offsets | other.offsets,
            self.lifted | other.lifted,
            self.windowed or other.windowed,
        )


@dataclass(frozen=True)
class Maps(ABC):
    """The affine maps of one value that a full weight on this value can compute. Each node's map is found once."""

    graph: Graph
    value: str
    channels: ClassVar[int] = -1  # their axis

    @cached_property
    def known(self) -> dict[str, AffineMap | None]:
        return {self.value: AffineMap()}

    def of(self, name: str) -> AffineMap | None:
        """The node as a map of the value; None if it is none, or none that the weight can compute."""
        return self.finished(self.found(name))

    def found(self, name: str) -> AffineMap | None:
        if name not in self.known:
            before = self.graph.place[name] < self.graph.place[self.value]  # it cannot depend on the value
            node = self.graph.nodes[name]
            result = None if before or not self.on_data(Ref(name)) else self.step(node)
            self.known[name] = None if result is None else result.after(node)
        return self.known[name]

    def finished(self, result: AffineMap | None) -> AffineMap | None:
        return result

    @abstractmethod
    def step(self, node: Node) -> AffineMap | None: ...

    @abstractmethod
    def fits(self, operand: Argument, node: Node) -> bool:
        """Whether an operand that depends on no data is the same at all places."""

    def on_data(self, argument: Argument) -> bool:
        return isinstance(argument, Ref) and self.graph.depends[argument.name][1]

    def shape(self, argument: Argument) -> tuple[int, ...]:
        return self.graph.nodes[argument.name].shape if isinstance(argument, Ref) else ()

    def arithmetic(self, node: Node) -> AffineMap | None:
        """Sums of affine maps; products and quotients with what is the same at all places."""
        if node.op == "aten.neg":
            return self.found(node.args[0].name)
        left, right = node.args[:2]
        sums = node.op in ("aten.add", "aten.sub")
        if self.on_data(left) and self.on_data(right):
            return self.sum(node, left, right) if sums else None
        if self.on_data(right) and node.op == "aten.div":
            return None
        data, other = (left, right) if self.on_data(left) else (right, left)
        inner = self.found(data.name)
        if inner is None or self.shape(data) != node.shape or not self.fits(other, node) or rounded(node):
            return None
        return inner.plus(other) if sums else inner.times(other)

    def sum(self, node: Node, left: Ref, right: Ref) -> AffineMap | None:
        parts = [self.finished(self.found(a.name)) for a in (left, right)]
        if parts[0] is None or parts[1] is None or not self.shape(left) == self.shape(right) == node.shape:
            return None
        return parts[0].added_to(parts[1])


def rounded(node: Node) -> bool:
    return bool(node.kwargs.get("rounding_mode"))


@dataclass(frozen=True)
class DenseMaps(Maps):
    """W·v along the last axis computes every chain of linear maps and factors per channel."""

    def step(self, node: Node) -> AffineMap | None:
        if node.op == "linear":
            inner = self.found(node.args[0].name)
            usable = len(node.args) == 2 and not self.on_data(node.args[1]) and len(self.shape(node.args[1])) == 2
            return inner.times(node.args[1]) if inner is not None and usable else None
        return self.arithmetic(node) if node.op in ARITHMETIC else None

    def fits(self, operand: Argument, node: Node) -> bool:
        return all(n == 1 for n in self.shape(operand)[:-1])


@dataclass(frozen=True)
class Window:
    """Tap t of the output at o reads the input at stride·o + dilation·t − padding, along every spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def single(self) -> bool:
        """Whether every output place reads the input at its own place alone."""
        return set(self.kernel) | set(self.stride) <= {1} and not any(self.padding)

    def taps(self, axis: int) -> set[int]:
        return {self.dilation[axis] * t - self.padding[axis] for t in range(self.kernel[axis])}

    def covers(self, other: Window) -> bool:
        """Whether each tap of the other window is a tap of this one."""
        return self.stride == other.stride and all(other.taps(a) <= self.taps(a) for a in range(len(self.kernel)))


def window_of(graph: Graph, node: Node) -> Window | None:
    """The window of a plain convolution of a batch, without a bias of its own; None for any other."""
    if node.op not in WINDOWS or not isinstance(node.args[1], Ref):
        return None
    axes = len(node.shape) - 2
    given = dict(zip(("bias", "stride", "padding", "dilation", "groups"), node.args[2:], strict=False)) | node.kwargs
    weight = graph.nodes[node.args[1].name].shape
    sizes = [
        spread(given.get(name, default), axes) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    if given.get("bias") is not None or axes < 1 or axes != int(node.op[-2]) or len(weight) != axes + 2:
        return None
    if sizes[0] is None or sizes[1] is None or sizes[2] is None:
        return None
    return Window(tuple(weight[2:]), sizes[0], sizes[1], sizes[2], int(given.get("groups", 1)))


def spread(size: Argument, axes: int) -> tuple[int, ...] | None:
    """One size for every axis; None if it is given in words."""
    if isinstance(size, int):
        return (size,) * axes
    if isinstance(size, (list, tuple)) and all(isinstance(n, int) for n in size) and len(size) in (1, axes):
        return tuple(size) * (axes if len(size) == 1 else 1)
    return None


@dataclass(frozen=True)
class ConvolutionMaps(Maps):
    """A convolution of v computes chains of 1 × 1 convolutions and factors with at most one window among its own taps.

    Padding puts zeros around what a convolution reads. Around v + c they make the constant another one at the border.
    """

    window: Window
    channels: ClassVar[int] = 1

    def step(self, node: Node) -> AffineMap | None:
        if node.op in ARITHMETIC:
            return self.arithmetic(node)
        window = window_of(self.graph, node)
        inner = None if window is None else self.found(node.args[0].name)
        if window is None or inner is None or self.on_data(node.args[1]):
            return None
        if self.window.groups > 1 and window.groups != self.window.groups:
            return None
        if not window.single:
            if inner.windowed or not self.window.covers(window) or (inner.constant and any(window.padding)):
                return None
            inner = replace(inner, windowed=True)
        return inner.times(node.args[1])

    def finished(self, result: AffineMap | None) -> AffineMap | None:
        """A map of single places is one of the window's own if a tap reads the output's own place."""
        if result is None or result.windowed:
            return result
        axes = range(len(self.window.kernel))
        own = set(self.window.stride) == {1} and all(0 in self.window.taps(a) for a in axes)
        return replace(result, windowed=True) if own else None

    def fits(self, operand: Argument, node: Node) -> bool:
        shape = self.shape(operand)
        padded = (1,) * (len(node.shape) - len(shape)) + shape
        return all(n == 1 for axis, n in enumerate(padded) if axis != 1)


@dataclass(frozen=True)
class RowMaps(Maps):
    """A table that is read at an index computes every function of this index alone."""

    @property
    def axes(self) -> int:
        """The axes of the index: batch and positions. Operations must leave these alone."""
        return len(self.graph.nodes[self.value].shape)

    def step(self, node: Node) -> AffineMap | None:
        if node.op in POINTWISE or node.op in ARITHMETIC:
            return self.together(node) if not rounded(node) else None
        if node.op == "aten.embedding":
            table, index = node.args[:2]
            return AffineMap().times(table) if index == Ref(self.value) and not self.on_data(table) else None
        inner = self.found(node.args[0].name) if node.args and isinstance(node.args[0], Ref) else None
        if inner is None or not self.acts_on_rows(node):
            return None
        return inner.times(node.args[1]) if node.op == "linear" else inner

    def together(self, node: Node) -> AffineMap | None:
        """Element by element: of functions of the same index, and of what is the same at all places."""
        result = AffineMap()
        for argument in node.args:
            if self.on_data(argument):
                inner = self.found(argument.name)
                if inner is None or not self.aligned(self.shape(argument), node):
                    return None
                result = result.added_to(inner)
            elif isinstance(argument, Ref):
                if not self.fits(argument, node):
                    return None
                result = result.times(argument)
        return result

    def aligned(self, shape: tuple[int, ...], node: Node) -> bool:
        """Whether the index's axes are still the first ones of both."""
        return len(shape) == len(node.shape) and shape[: self.axes] == node.shape[: self.axes]

    def acts_on_rows(self, node: Node) -> bool:
        before, after = self.shape(node.args[0]), node.shape
        if before[: self.axes] != after[: self.axes]:
            return False
        if node.op == "linear":
            weight = node.args[1]
            return len(node.args) == 2 and not self.on_data(weight) and len(before) > self.axes
        if node.op in ROW_CORES:
            return len(before) - node.args[1] >= self.axes
        return node.op == "aten.reshape"

    def fits(self, operand: Argument, node: Node) -> bool:
        shape = self.shape(operand)
        padded = (1,) * (len(node.shape) - len(shape)) + shape
        return all(n == 1 for n in padded[: self.axes])
