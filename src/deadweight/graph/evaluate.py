"""Running a Graph in float64, whatever precision the model's code uses."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import RANDOM, Graph, Node, Ref, Value, substitute

aten = torch.ops.aten
Values = dict[str, Value]
FILL = 1e29  # masks fill in numbers this large; next to them no other entry of an output would count


def evaluate(
    graph: Graph,
    tensors: Mapping[str, Value],
    inputs: Mapping[str, Tensor],
    watch: Callable[[Node, Value], Value] | None = None,
    near: Near | None = None,
) -> list[Tensor]:
    """The outputs for these parameters (by node name) and inputs; `watch` sees, and may replace, each node's value.

    A parameter is a tensor, or `Lazy`. With `near`, the run of a nearby point, only what can differ is computed.
    """
    values: Values = {} if near is None else Overlay(near.values)
    other = set[str]()  # nodes whose value differs from that of the nearby run
    with float64_default():
        for step, node in enumerate(graph.nodes.values()):
            if near is None or node.name in near.moved or not other.isdisjoint(node.inputs):
                values[node.name] = value_of(graph, node, values, tensors, inputs)
                if near is not None and not same_value(values[node.name], near.values[node.name]):
                    other.add(node.name)
            if watch is not None:
                values[node.name] = watch(node, values[node.name])
            for name in graph.last_reads.get(step, ()):
                values.pop(name, None)
    return [values[name] for name in graph.outputs]


@dataclass(frozen=True)
class Near:
    """The values of all nodes in an earlier run on the same inputs, and the parameters that were `moved` since."""

    values: Mapping[str, Value]
    moved: Set[str]


class Overlay(dict):
    """Values of one run on top of those of another: a missing value is looked up `below`."""

    def __init__(self, below: Mapping[str, Value]) -> None:
        super().__init__()
        self.below = below

    def __missing__(self, name: str) -> Value:
        return self.below[name]


def same_value(one: Value, other: Value) -> bool:
    """Whether two tensors are equal, number by number; anything else counts as different."""
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.dtype == other.dtype and torch.equal(one, other)


def largest_difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference between the outputs of two runs, relative to each output's largest entry.

    It is infinite if only one of two entries is finite, if NaN and infinity do not match, or if an integer changes.
    NaN in both runs is no difference, nor is the same infinity.
    """
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if isinstance(a, Tensor) and a.numel()]
    return max((difference(a, b) for a, b in pairs), default=0.0)


def difference(a: Tensor, b: Tensor) -> float:
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else math.inf
    finite = torch.isfinite(a)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if not bool(torch.where(finite, torch.isfinite(b), same).all()):
        return math.inf
    fill = a.abs() >= FILL
    return max(relative_gap(a[part], b[part]) for part in (finite & ~fill, finite & fill))


def relative_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)) if a.numel() else 0.0


def real_outputs(outputs: list[Tensor]) -> list[Tensor]:
    """The floating-point outputs, complex ones as pairs of real numbers."""
    tensors = [out for out in outputs if isinstance(out, Tensor)]
    return [
        torch.view_as_real(out) if out.is_complex() else out
        for out in tensors
        if out.is_complex() or out.is_floating_point()
    ]


def value_of(
    graph: Graph, node: Node, values: Values, tensors: Mapping[str, Value], inputs: Mapping[str, Tensor]
) -> Value:
    if node.op in ("parameter", "buffer"):
        stored = tensors[node.name]
        return stored if read_in_pieces(graph, node) else as_float64(stored)
    if node.op == "input":
        return as_float64(inputs[node.name])
    assert node.target is not None
    args, kwargs = (substitute(part, values.__getitem__) for part in node.float64_arguments)
    if node.op == "linear":
        return linear_in_pieces(*args)
    if node.op == "aten.embedding":
        return as_float64(node.target(as_tensor(args[0]), *args[1:], **kwargs))
    if node.op not in RANDOM:
        return node.target(*args, **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(node.name.encode()))  # the same random numbers in every run: runs can be compared
        return node.target(*args, **kwargs)


PIECE = 1 << 19  # elements of a stored weight that are cast to float64 at a time: they fit into the CPU's cache


@dataclass(frozen=True)
class Lazy:
    """A weight of low precision times a factor in float64, multiplied out a few rows at a time."""

    stored: Tensor
    factor: Tensor  # broadcasts against `stored`

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    def rows(self, rows: slice, into: Tensor) -> Tensor:
        factor = self.factor[rows] if self.factor.shape[0] == len(self.stored) else self.factor
        return into.copy_(self.stored[rows]).mul_(factor)

    def whole(self) -> Tensor:
        return self.rows(slice(None), torch.empty(self.shape, dtype=torch.float64))


def read_in_pieces(graph: Graph, node: Node) -> bool:
    """Whether all readers of this weight can take it in its stored precision, a few rows at a time."""
    readers = graph.users[node.name]
    return bool(readers) and all(
        (r.op == "linear" and [a == Ref(node.name) for a in r.args] == [False, True])
        or (r.op == "aten.embedding" and r.inputs.count(node.name) == 1)
        for r in readers
    )


def linear_in_pieces(x: Tensor, weight: Tensor | Lazy) -> Tensor:
    """x·Wᵀ in float64, for a weight that may be stored in a lower precision."""
    if isinstance(weight, Tensor) and weight.dtype == torch.float64:
        return aten.linear.default(x, weight)
    return torch.cat([aten.linear.default(x, piece) for piece in pieces(weight)], -1)


def pieces(weight: Tensor | Lazy, size: int | None = None) -> Iterator[Tensor]:
    """The rows in float64, a few at a time, in one buffer that is reused: allocating each time would cost more."""
    step = max(1, (size or PIECE) // max(weight.shape[1:].numel(), 1))
    buffer = torch.empty((min(step, len(weight)), *weight.shape[1:]), dtype=torch.float64)
    for start in range(0, len(weight), step):
        rows = slice(start, min(start + step, len(weight)))
        into = buffer[: rows.stop - rows.start]
        yield weight.rows(rows, into) if isinstance(weight, Lazy) else into.copy_(weight[rows])


def as_tensor(weight: Tensor | Lazy) -> Tensor:
    return weight.whole() if isinstance(weight, Lazy) else weight


def as_float64(tensor: Tensor | Lazy) -> Tensor:
    if isinstance(tensor, Lazy):
        return tensor.whole()
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


@contextmanager
def float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
