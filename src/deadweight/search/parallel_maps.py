"""DW020: summands that are maps of the same value, one of them with a full weight of its own.

A sum W·v + g(v; θ), where g is affine in v and W can take any value, contains θ only through W + M(θ) and through the
constant of g. So θ may move at will, if W (and a bias, where the constant depends on θ) undoes it. W must be read here
alone, and θ in g alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod

import torch

from deadweight.claims.claim import Title
from deadweight.claims.parallel_claim import (
    DenseImpulses,
    Host,
    Impulses,
    Offset,
    ParallelClaim,
    RowImpulses,
    Term,
    WindowImpulses,
)
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.constants import constant_value
from deadweight.graph.node import Argument, Graph, Node, Ref
from deadweight.proof.affine_maps import (
    AffineMap,
    ConvolutionMaps,
    DenseMaps,
    Maps,
    RowMaps,
    rounded,
    window_of,
)
from deadweight.proof.steps import Step
from deadweight.search.prover import Prover

VIEWS = {"aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.t", "aten.transpose", "aten.permute"}
SUMS = ("aten.add", "aten.sub")
POSITIVE = {"running_scale"}  # 1/sqrt(variance + ε)


def find_parallel_maps(prover: Prover, law: Title) -> Iterator[ParallelClaim]:
    graph = prover.graph
    for node in graph.nodes.values():
        if node.op in SUMS and node.name in graph.live and not is_partial(graph, node):
            yield from Sum(prover, law, node).claims()


def is_partial(graph: Graph, node: Node) -> bool:
    """Whether a sum is only a summand of another one of the same shape."""
    return alone(graph, node.name) and all(u.op in SUMS and u.shape == node.shape for u in graph.users[node.name])


def alone(graph: Graph, name: str) -> bool:
    """Whether one operation reads a value, once."""
    readers = graph.users[name]
    return len(readers) == 1 and readers[0].inputs.count(name) == 1 and name not in graph.outputs


def summands(graph: Graph, node: Node, factor: float = 1.0, sums: tuple[str, ...] = ()) -> Iterator[Term]:
    """What a sum is made of, with the factor of each."""
    signs = (1.0, float(node.kwargs.get("alpha", 1)) * (-1 if node.op == "aten.sub" else 1))
    for argument, sign in zip(node.args[:2], signs, strict=True):
        if isinstance(argument, Ref) and factor * sign != 0:
            inner = graph.node(argument)
            if inner.op in SUMS and alone(graph, inner.name) and inner.shape == node.shape:
                yield from summands(graph, inner, factor * sign, (inner.name, *sums))
            else:
                yield Term(inner.name, factor * sign, sums)


@dataclass
class Sum:
    """One sum, and the claims about its summands."""

    prover: Prover
    law: Title
    total: Node
    hosts_in_use: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.prover.graph

    def claims(self) -> Iterator[ParallelClaim]:
        terms = [t for t in summands(self.graph, self.total) if alone(self.graph, t.node)]
        if len(terms) < 2:
            return
        claimed = {c.node for c in self.prover.claims if c.whole}
        hosts = [host for term in terms for host in hosts_of(self.graph, term)]
        for host, maps in sorted(hosts, key=lambda pair: -prod(self.graph.nodes[pair[0].parameter].shape)):
            for term in terms:
                if term != host.term and host.parameter not in claimed:
                    for claim in self.of_guest(host, maps, term, terms):
                        if claim.node not in claimed | self.hosts_in_use:
                            claimed.add(claim.node)
                            self.hosts_in_use.add(host.parameter)
                            yield claim

    def of_guest(self, host: Host, maps: Maps, term: Term, terms: Sequence[Term]) -> Iterator[ParallelClaim]:
        """The parameters of one summand that the host makes redundant."""
        found = maps.of(term.node)
        if found is None or self.graph.nodes[term.node].shape != self.graph.nodes[host.term.node].shape:
            return
        rows = isinstance(maps, RowMaps)  # a table takes over constants too
        behind = self.prover.made_of
        added = 0 if rows else self.bits(found.offsets)
        for node in self.prover.parameters():
            bit = behind[node.name]
            inside = self.nodes_inside(node, found, term) if bit & self.bits(found.factors) else None
            if inside is None or bit & added or node.name == host.parameter or self.is_moved(node):
                continue
            lifted = not rows and bool(bit & self.bits(found.lifted))
            offset = next(offsets_of(self.graph, maps, host.term, terms), None) if lifted else None
            if lifted and offset is None:
                continue
            host = self.with_rows(host, found) if rows else host
            yield self.claim(node, term, host, offset, inside)

    def bits(self, operands: frozenset[str]) -> int:
        """The parameters behind these operands."""
        result = 0
        for name in operands & self.graph.nodes.keys():
            result |= self.prover.made_of[name]
        return result

    def nodes_inside(self, node: Node, found: AffineMap, term: Term) -> list[str] | None:
        """Every node that a change of the parameter reaches before the sum; None if it gets out of the summand."""
        graph, seen, stack = self.graph, {node.name: None}, [node.name]
        while stack:
            name = stack.pop()
            if name in graph.outputs:
                return None
            for reader in graph.users[name] if name != term.node else ():
                if reader.name not in found.nodes and graph.depends[reader.name][1]:
                    return None
                if reader.name not in seen:
                    seen[reader.name] = None
                    stack.append(reader.name)
        return sorted(seen, key=graph.place.__getitem__) if term.node in seen else None

    def is_moved(self, node: Node) -> bool:
        """Whether earlier laws have already made all of a parameter redundant."""
        return self.left(node) <= 0

    def left(self, node: Node) -> int:
        """The elements of a parameter less what earlier laws claim of it."""
        earlier = [c for c in self.prover.claims if c.node == node.name and (isinstance(c, ShiftClaim) or c.whole)]
        return prod(node.shape) - sum(prod(node.shape) if c.whole else c.dof for c in earlier)

    def with_rows(self, host: Host, found: AffineMap) -> Host:
        """The host with as many rows as all tables have that are read at the index."""
        assert isinstance(host.impulses, RowImpulses)
        tables = [n for n in map(self.graph.nodes.__getitem__, found.nodes) if n.op == "aten.embedding"]
        rows = [self.graph.nodes[n.args[0].name].shape[0] for n in tables]
        return replace(host, impulses=replace(host.impulses, rows=min([host.impulses.rows, *rows])))

    def claim(self, node: Node, term: Term, host: Host, offset: Offset | None, inside: list[str]) -> ParallelClaim:
        of = self.graph.parameters[host.parameter]
        into = (host.parameter,) if offset is None else (host.parameter, offset.parameter)
        return ParallelClaim(
            law=self.law,
            node=node.name,
            dof=self.left(node),
            verdict="folds",
            into=into,
            steps=self.steps(term, host, offset, inside),
            note=f"what it makes is a map of the value that {of} reads, and both are added",
            whole=True,
            guest=term,
            host=host,
            offset=offset,
        )

    def steps(self, term: Term, host: Host, offset: Offset | None, inside: list[str]) -> tuple[Step, ...]:
        """Every node that moves, in order; the sum does not."""
        moved = {*inside, *term.sums, *host.nodes, *host.term.sums}
        moved |= set() if offset is None else {*offset.nodes, *offset.term.sums}
        order = sorted(moved, key=self.graph.place.__getitem__)
        why = "a map of the value that the host multiplies"
        steps = [Step(n, self.graph.nodes[n].op, why, "moved", True) for n in order]
        return (*steps, Step(self.total.name, self.total.op, "the host's weight undoes it", "M·v − M·v = 0"))


def hosts_of(graph: Graph, term: Term) -> Iterator[tuple[Host, Maps]]:
    """The weight that makes a summand, if it is read here alone: of a linear map, a convolution or a look-up."""
    way, node = [term.node], graph.nodes[term.node]
    while (inner := behind_factors(graph, node)) is not None and alone(graph, inner.name):
        node = inner
        way.append(node.name)
    kinds = {"linear": (1, 0), "aten.embedding": (0, 1)}
    weight_at, value_at = kinds.get(node.op, (1, 0))
    reads = len(node.args) > 1 and isinstance(node.args[0], Ref) and isinstance(node.args[1], Ref)
    found = maps_of(graph, node, node.args[value_at].name) if reads else None
    if found is None:
        return
    views = list(views_of(graph, node.args[weight_at]))
    parameter = graph.nodes[views[-1]] if views else None
    impulses, maps = found
    if parameter is not None and parameter.op == "parameter" and parameter.is_float and maps.of(term.node) is not None:
        yield Host(parameter.name, views[0], node.name, term, impulses, (*reversed(views), *reversed(way))), maps


def maps_of(graph: Graph, node: Node, value: str) -> tuple[Impulses, Maps] | None:
    """How a full weight is tried out, and what it can compute."""
    shape = graph.nodes[value].shape
    if not graph.depends[value][1]:
        return None
    if node.op == "linear" and len(node.args) == 2 and len(graph.nodes[node.args[1].name].shape) == 2:
        return DenseImpulses(value, shape[-1]), DenseMaps(graph, value)
    if node.op == "aten.embedding":
        rows = graph.nodes[node.args[0].name].shape[0]
        return RowImpulses(value, rows, shape), RowMaps(graph, value)
    window = window_of(graph, node)
    if window is not None:
        return WindowImpulses(value, shape[1], window), ConvolutionMaps(graph, value, window)
    return None


def behind_factors(graph: Graph, node: Node) -> Node | None:
    """What is multiplied by factors that are not zero, moved by constants, or reshaped, on the way to a summand."""
    if node.op in ("aten.neg", "aten.reshape"):
        return graph.node(node.args[0])
    if node.op not in ("aten.mul", "aten.div", *SUMS) or len(node.args) != 2 or rounded(node):
        return None
    left, right = node.args
    on_data = [isinstance(a, Ref) and graph.depends[a.name][1] for a in (left, right)]
    data, other = (left, right) if on_data[0] else (right, left)
    if all(on_data) or not any(on_data) or (node.op == "aten.div" and data is right):
        return None
    if node.op not in SUMS and not never_zero(graph, other):
        return None
    return graph.node(data) if graph.node(data).shape == node.shape else None


def never_zero(graph: Graph, operand: Argument) -> bool:
    """Numbers and constants that are not zero; parameters and stored single factors, which are not so in general."""
    if isinstance(operand, Ref):
        node = graph.node(operand)
        while node.op in VIEWS:
            node = graph.node(node.args[0])
        if node.op in POSITIVE or node.op == "parameter":
            return True
        value = constant_value(graph, node.name)
        if value is None and node.op == "buffer" and prod(node.shape) == 1:
            return True  # its value is not known; a table times zero would be no table
        return value is not None and bool((torch.as_tensor(value) != 0).all())
    return isinstance(operand, (int, float)) and operand != 0 and isfinite(operand)


def views_of(graph: Graph, argument: Argument) -> Iterator[str]:
    """A weight as it is read, and what it is a view of, down to the parameter; nothing if something else reads it."""
    while isinstance(argument, Ref) and alone(graph, argument.name):
        node = graph.node(argument)
        yield node.name
        if node.op not in VIEWS:
            return
        argument = node.args[0]


def offsets_of(graph: Graph, maps: Maps, of: Term, terms: Sequence[Term]) -> Iterator[Offset]:
    """Biases among the summands: vectors that are read here alone, with a number for each channel."""
    whole = graph.nodes[of.node]
    for term in terms:
        views = list(views_of(graph, Ref(term.node)))
        node = graph.nodes[views[-1]] if views else None
        if node is None or not maps.fits(Ref(term.node), whole):
            continue
        if node.op == "parameter" and node.is_float and prod(node.shape) == whole.shape[maps.channels]:
            yield Offset(node.name, term, tuple(reversed(views)))
