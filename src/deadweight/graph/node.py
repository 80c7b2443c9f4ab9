"""A traced model as data: nodes in execution order, parameters by their state-dict names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, TypeAlias

import torch

from deadweight.graph.origin import Origin

Value: TypeAlias = Any  # what a node computes: a tensor, several of them, or a number
Argument: TypeAlias = Any  # of a node: a Ref, a number, a string, or a list of these
Target: TypeAlias = Callable[..., Value]  # the function that computes a node

DROPOUTS = {"aten.alpha_dropout", "aten.dropout", "aten.feature_dropout", "aten.native_dropout"}
DRAWS = (
    "bernoulli cauchy exponential geometric log_normal multinomial normal poisson rand randint randn random randperm"
)
RANDOM = DROPOUTS | {
    f"aten.{kind}{suffix}"
    for kind in (*DRAWS.split(), "rrelu_with_noise", "uniform")
    for suffix in ("", "_like", "_functional")
}


@dataclass(frozen=True)
class Ref:
    """A node's argument that is another node's value."""

    name: str


@dataclass(frozen=True)
class Operation:
    """What a node computes: the name by which rules know it, and the function."""

    name: str
    target: Target


@dataclass(frozen=True)
class Node:
    """One operation: `op` is its name without the overload ("aten.linear"), or parameter, buffer, input, constant."""

    name: str
    op: str
    target: Target | None = None
    args: tuple[Argument, ...] = ()
    kwargs: dict[str, Argument] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    origin: Origin | None = field(default=None, compare=False, repr=False)  # for people: no rule reads it

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the nodes it reads, in order; a node that is read twice is named twice."""
        return tuple(ref.name for ref in references((self.args, self.kwargs)))

    @cached_property
    def float64_arguments(self) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Positional and named arguments of the same operation in float64."""
        return float64_arguments(self.args), float64_arguments(self.kwargs)

    @property
    def operation(self) -> Operation:
        assert self.target is not None, f"{self.name} is not computed"
        return Operation(self.op, self.target)

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and self.dtype.is_floating_point


def references(value: Argument) -> Iterator[Ref]:
    """Every Ref inside nested tuples, lists and dicts."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from references(item)


def substitute(value: Argument, lookup: Callable[[str], Value]) -> Argument:
    """The same nesting with every Ref replaced by what `lookup` gives for its name."""
    kind = type(value)
    if kind is Ref:
        return lookup(value.name)
    if kind in PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return kind([substitute(item, lookup) for item in value])
    if isinstance(value, dict):
        return {key: substitute(item, lookup) for key, item in value.items()}
    return value


PLAIN = {int, float, bool, str, type(None), torch.dtype}  # looked up first: graphs are run many times


def float64_arguments(value: Argument) -> Argument:
    """The same arguments with every float dtype replaced by float64."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, (list, tuple)):
        return type(value)(float64_arguments(v) for v in value)
    if isinstance(value, dict):
        return {k: float64_arguments(v) for k, v in value.items()}
    return value


@dataclass(frozen=True)
class View:
    """A new order of axes, then a new shape."""

    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(self.order).reshape(self.shape)


@dataclass(frozen=True)
class Piece:
    """A slice of a stored parameter: a range along every axis; `squeezed` axes, of length one, are left out.

    `views` then change its form: the elements stay the same. A `whole` parameter may be seen in another form, too.
    """

    ranges: tuple[tuple[int, int], ...]
    squeezed: tuple[int, ...] = ()
    views: tuple[View, ...] = ()
    whole: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.viewed(tensor[tuple(slice(*r) for r in self.ranges)])

    def viewed(self, part: torch.Tensor) -> torch.Tensor:
        """The slice in the form in which it is read."""
        part = part.squeeze(self.squeezed) if self.squeezed else part
        for view in self.views:
            part = view.of(part)
        return part

    def rows(self, axis: int, index: torch.Tensor) -> list[int]:
        """The stored rows (along the first axis) that hold these indices of an axis of the piece."""
        shape = [stop - start for start, stop in self.ranges]
        numbers = torch.arange(shape[0]).reshape([-1] + [1] * (len(shape) - 1)).expand(shape)
        return (self.viewed(numbers).index_select(axis, index).unique() + self.ranges[0][0]).tolist()

    def within(self, inner: Piece) -> Piece:
        """A slice of this slice, as a slice of the whole."""
        assert not self.views, "only what is read as it is stored is read in slices"
        kept = [a for a in range(len(self.ranges)) if a not in self.squeezed]
        ranges = list(self.ranges)
        for axis, (start, stop) in zip(kept, inner.ranges, strict=True):
            ranges[axis] = (self.ranges[axis][0] + start, self.ranges[axis][0] + stop)
        return Piece(tuple(ranges), tuple(sorted({*self.squeezed, *(kept[a] for a in inner.squeezed)})))

    def axis(self, own: int) -> int:
        """The stored axis that an axis of the piece is."""
        return [a for a in range(len(self.ranges)) if a not in self.squeezed][own]


@dataclass
class Graph:
    """Nodes in execution order; `parameters` maps node names to state-dict names, `outputs` names what is returned."""

    nodes: dict[str, Node]
    parameters: dict[str, str]
    outputs: tuple[str, ...]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # parameter, buffer and constant values by node name
    inputs: tuple[str, ...] = ()  # input node names, in the order of the flattened example inputs
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)  # state-dict name: its other names
    unused: tuple[str, ...] = ()  # parameters no node reads
    training: bool = False
    buffers: dict[str, str] = field(default_factory=dict)  # stored buffers: node name to state-dict name
    pieces: dict[str, Piece] = field(default_factory=dict)  # parameter nodes that are a slice of what is stored
    specialised: tuple[str, ...] = ()  # notes, where Python code read values: the graph is that of one path

    def stored_name(self, node: str) -> str:
        """The state-dict name of a parameter or stored buffer."""
        return self.parameters[node] if node in self.parameters else self.buffers[node]

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """For each node, the nodes that read its value."""
        readers: dict[str, dict[str, Node]] = {name: {} for name in self.nodes}
        for node in self.nodes.values():
            for name in node.inputs:
                readers[name][node.name] = node
        return {name: tuple(own.values()) for name, own in readers.items()}

    @cached_property
    def place(self) -> dict[str, int]:
        """The position of each node in the order of execution."""
        return {name: i for i, name in enumerate(self.nodes)}

    def downstream(self, start: Iterable[str], goes_on: Callable[[str], bool]) -> Iterator[Node]:
        """These nodes and, in execution order, the readers of those for which `goes_on` is true."""
        order = list(self.nodes)
        waiting = sorted({self.place[name] for name in start})
        known = set(waiting)
        while waiting:
            name = order[heappop(waiting)]
            yield self.nodes[name]
            if goes_on(name):
                for reader in self.users[name]:
                    if self.place[reader.name] not in known:
                        known.add(self.place[reader.name])
                        heappush(waiting, self.place[reader.name])

    @cached_property
    def last_reads(self) -> dict[int, list[str]]:
        """Position of a node to the values that no later node reads; outputs are not among them."""
        last = {}
        for step, node in enumerate(self.nodes.values()):
            last[node.name] = step
            for name in node.inputs:
                last[name] = step
        freed: dict[int, list[str]] = {}
        for name, step in last.items():
            if name not in self.outputs:
                freed.setdefault(step, []).append(name)
        return freed

    @cached_property
    def node_of(self) -> dict[str, str]:
        """Parameter name to node name."""
        return {parameter: node for node, parameter in self.parameters.items()}

    @cached_property
    def depends(self) -> dict[str, tuple[bool, bool]]:
        """For each node, whether its value depends on any parameter, and whether on any input or random draw."""
        result: dict[str, tuple[bool, bool]] = {}
        for node in self.nodes.values():
            if node.op == "parameter":
                result[node.name] = (True, False)
            elif node.op == "input":
                result[node.name] = (False, True)
            else:
                flags = [result[name] for name in node.inputs]
                drawn = node.op in RANDOM
                result[node.name] = (any(p for p, _ in flags), drawn or any(d for _, d in flags))
        return result

    @cached_property
    def live(self) -> set[str]:
        """The nodes from which a path leads to an output."""
        seen: set[str] = set()
        stack = list(self.outputs)
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack.extend(self.nodes[name].inputs)
        return seen

    def node(self, ref: Ref | str) -> Node:
        return self.nodes[ref.name if isinstance(ref, Ref) else ref]


def is_vector(node: Node) -> bool:
    """At most one axis is longer than 1: a bias, a gain, an embedding, a single number."""
    return sum(n > 1 for n in node.shape) <= 1
