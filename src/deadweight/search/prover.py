"""The search: which sources to try, walk by walk, and what has been proved so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title
from deadweight.graph.constants import known_indices
from deadweight.graph.node import Graph, Node, Ref, substitute
from deadweight.proof import shift_rules as _rules  # noqa: F401  (registers the rules)
from deadweight.proof.identity_labels import Identity
from deadweight.proof.labels import compact, scramble
from deadweight.proof.operation_groups import COMPARISONS, CONVOLUTIONS, POINTWISE, SHAPE
from deadweight.proof.shift import Absorbers, Outcome, Shift, ShiftWalk
from deadweight.proof.shift_rules.arithmetic import stopped_by
from deadweight.proof.steps import Blocked

T = TypeVar("T")


@dataclass
class Prover:
    """One graph under proof."""

    graph: Graph
    claims: list[Claim] = field(default_factory=list)
    blocked: dict[str, list[tuple[Tensor, Outcome]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identity = Identity(self.graph)
        self.walks: dict[tuple, Outcome] = {}
        self.remembered: dict[Callable[[Prover], Any], Any] = {}
        self.alive: dict[str, Blocked | None] = {}
        self.known_parts: dict[str, list[Tensor]] = {}
        self.made_of = parameters_behind(self.graph)

    def remember(self, compute: Callable[[Prover], T]) -> T:
        """What a function makes of this graph, computed once for all laws that ask."""
        if compute not in self.remembered:
            self.remembered[compute] = compute(self)
        return self.remembered[compute]

    def parts(self, node: Node) -> list[Tensor]:
        """A vector parameter's elements, split by where each is first computed with: fused biases fall apart.

        A gain has none: what it multiplies varies from channel to channel, so no shift of it is ever uniform.
        """
        if node.name not in self.known_parts and all(r.op == "aten.mul" for r in self.graph.users[node.name]):
            self.known_parts[node.name] = []
        if node.name not in self.known_parts:
            flat = torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)
            self.known_parts[node.name] = split_by_readers(self.graph, node, flat)
        return self.known_parts[node.name]

    def emptied_into(self, node: str) -> frozenset[str]:
        """Parameters that folds have already emptied into this one, directly or not: they cannot take it over again."""
        emptied = {node}
        while True:
            more = {c.node for c in self.claims if c.verdict == "folds" and emptied & set(c.into)} - emptied
            if not more:
                return frozenset(emptied)
            emptied |= more

    def walk(self, node: str, groups: Tensor, absorbers: Absorbers = "none", *, fixed: bool = True) -> Outcome:
        """Follow a change of every group of elements (0: unchanged) at a node to the outputs.

        `fixed` says that the amounts are the same for every input, as those of a parameter are.
        """
        short = compact(groups)
        exclude = self.emptied_into(node) if absorbers != "none" else frozenset({node})
        key = (node, absorbers, exclude, fixed, short.shape, short.numpy().tobytes())
        if key not in self.walks:
            sources = {node: numbered(groups, fixed)}
            self.walks[key] = ShiftWalk(self.graph, self.identity, sources, exclude, absorbers=absorbers).run()
        return self.walks[key]

    def attempt(self, node: str, groups: Tensor, absorbers: Absorbers = "none") -> Outcome:
        """The same, but no walk where it is sure that the change arrives."""
        reader = self.sure_reader(node) if absorbers == "none" else None
        return self.walk(node, groups, absorbers) if reader is None else Outcome([], {}, reader)

    def walk_together(self, nodes: Sequence[str], groups: Tensor, absorbers: Absorbers) -> Outcome:
        """Follow the same change of the last axis at several nodes at once: a weight that is used at all of them."""
        labels = torch.where(groups == 0, 0, scramble(groups))
        shapes = {name: self.graph.nodes[name].shape for name in nodes}
        sources = {
            name: Shift(labels.expand(shape), groups.to(torch.int32).expand(shape), fixed=True)
            for name, shape in shapes.items()
        }
        return ShiftWalk(self.graph, self.identity, sources, frozenset(nodes), absorbers=absorbers).run()

    def prove(self, node: str, groups: Tensor, absorbers: Absorbers = "none") -> tuple[Tensor, Outcome]:
        """The largest part of these groups that is proved, dropping the elements that a first walk finds varying."""
        outcome = self.attempt(node, groups, absorbers)
        for _ in range(2):
            if outcome.proved or not outcome.suspects:
                break
            kept = torch.where(torch.isin(groups, torch.tensor(sorted(outcome.suspects))), 0, groups)
            if not bool(kept.any()) or torch.equal(kept, groups):
                break
            self.stopped(node, groups, outcome)
            groups, outcome = kept, self.walk(node, kept, absorbers)
        if not outcome.proved:
            self.stopped(node, groups, outcome)
        return groups, outcome

    def stopped(self, node: str, groups: Tensor, outcome: Outcome) -> None:
        self.blocked.setdefault(node, []).append((groups, outcome))

    def surely_alive(self, node: str) -> bool:
        """Whether some way on which nothing can stop a shift leads from a parameter to what no shift can pass."""
        return self.sure_reader(node) is not None

    def sure_reader(self, node: str) -> Blocked | None:
        """What stands at the end of such a way."""
        if node not in self.alive:
            self.alive[node] = reaches_reader(self.graph, self.made_of, node)
        return self.alive[node]

    def has(self, law: Title, node: str) -> bool:
        return any(c.law == law and c.node == node for c in self.claims)

    def parameters(self) -> Iterator[Node]:
        for name in self.graph.parameters:
            node = self.graph.nodes[name]
            if self.graph.users[name] and node.is_float and 0 not in node.shape:
                yield node


PASSES = {
    "aten.add",
    "aten.mul",
    "linear",
    "experts",
    "aten.neg",
    "aten.reshape",
    "aten.transpose",
    "aten.permute",
    "aten.t",
    "aten.unsqueeze",
    *CONVOLUTIONS,
}
PRODUCTS = {"linear", "aten.reshape", "parameter", *CONVOLUTIONS}
NON_LINEAR = (POINTWISE - COMPARISONS) | {"core.rms", "core.unit", "output"}


def numbered(groups: Tensor, fixed: bool) -> Shift:
    """The shift of a node whose elements move group by group (0: not at all)."""
    short = compact(groups)
    labels = scramble(short.to(torch.int64)).masked_fill_(short == 0, 0).expand(groups.shape)
    return Shift(labels, short.to(torch.int32).expand(groups.shape), fixed=fixed)


def parameters_behind(graph: Graph) -> dict[str, int]:
    """For each node a set of bits: the parameters that its value depends on."""
    result: dict[str, int] = {}
    for node in graph.nodes.values():
        own = 1 << len(result) if node.op == "parameter" else 0
        for name in node.inputs:
            own |= result[name]
        result[node.name] = own
    return result


def reaches_reader(graph: Graph, made_of: dict[str, int], node: str) -> Blocked | None:
    """Through sums, products and linear maps of one changed operand to a non-linear function, an RMSNorm or an output.

    Nothing on such a way stops a shift; where two changed values meet they might cancel.
    """
    if graph.nodes[node].op != "parameter":
        return None
    stack, seen = [node], set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in graph.outputs:
            return Blocked(name, "output", "the shift reaches the output")
        for reader in graph.users[name]:
            if reader.op in NON_LINEAR:
                return stopped_by(reader)
            passes = reader.op in PASSES or less_constant(graph, reader)
            changed = sum(bool(made_of[n] & made_of[node]) for n in reader.inputs)
            if changed == 1 and (passes or (reader.op == "aten.embedding" and name == node)):
                stack.append(reader.name)
    return None


def less_constant(graph: Graph, node: Node) -> bool:
    """A difference with a constant keeps every shift; one of two values may cancel it."""
    return (
        node.op == "aten.sub" and isinstance(node.args[1], Ref) and graph.depends[node.args[1].name] == (False, False)
    )


def split_by_readers(graph: Graph, node: Node, numbers: Tensor) -> list[Tensor]:
    """The numbered elements of a value, in classes of elements that the same operations read first."""
    uses = first_uses(graph, node, numbers)
    flat = compact(numbers)
    if not flat.numel():
        return []
    codes = torch.zeros(int(flat.max()) + 1, dtype=torch.int64)
    for bit, elements in enumerate(uses.values()):
        codes[elements] += 1 << min(bit, 62)
    classes = [c for c in codes[flat.reshape(-1)].unique().tolist() if c]
    short = codes[flat]
    return [torch.where((short == c) & (flat != 0), flat, 0).expand(numbers.shape) for c in classes]


def first_uses(graph: Graph, node: Node, numbers: Tensor) -> dict[str, Tensor]:
    """Which of the numbered elements of a value reach which operand (`operation:place`) first."""
    uses: dict[str, Tensor] = {}
    for reader in graph.users[node.name]:
        follow(graph, reader, {node.name: numbers}, uses)
    return uses


def follow(graph: Graph, node: Node, values: dict[str, Tensor], uses: dict[str, Tensor]) -> None:
    """Elements travel through shape operations, products with constants and one addition to a linear map's output.

    Note who computes next.
    """
    known = [values[n] for n in node.inputs if n in values]
    moved = None
    if (node.op == "aten.add" and adds_to_product(graph, node, values)) or is_constant_multiple(graph, node, values):
        moved = known[0].expand(node.shape)
    elif known_indices(graph, node) is not None and node.target is not None and node.args[0].name in values:
        moved = node.target(values[node.args[0].name], known_indices(graph, node))
    elif node.op in SHAPE and len(node.inputs) == 1:
        moved = known[0][node.args[1]] if node.op == "getitem" else run_shape(node, known[0])
    elif node.op in ("aten.cat", "aten.stack") and node.target is not None:
        beside = {n: torch.zeros(graph.nodes[n].shape, dtype=torch.int64) for n in node.inputs if n not in values}
        moved = node.target(*substitute(node.args, lambda name: (values | beside)[name]), **node.kwargs)
    if moved is None:
        for place, name in enumerate(node.inputs):
            if isinstance(values.get(name), Tensor):
                elements = compact(values[name]).unique()
                where = f"{node.name}:{place}"
                uses[where] = torch.cat([uses[where], elements]).unique() if where in uses else elements
        return
    for reader in graph.users[node.name]:
        follow(graph, reader, {node.name: moved}, uses)


def adds_to_product(graph: Graph, node: Node, values: dict[str, Tensor]) -> bool:
    """A bias and the product it is added to: elements of either keep their places."""
    others = [graph.node(a) for a in node.args if isinstance(a, Ref) and a.name not in values]
    return len(others) == 1 and len(node.inputs) == 2 and others[0].op in PRODUCTS


def is_constant_multiple(graph: Graph, node: Node, values: dict[str, Tensor]) -> bool:
    """A value times, or over, what depends on neither parameters nor inputs: elements keep their places."""
    if node.op not in ("aten.mul", "aten.div") or node.kwargs:
        return False
    others = [name for name in node.inputs if name not in values]
    constant = all(graph.depends[name] == (False, False) for name in others)
    return constant and len(node.inputs) - len(others) == 1 and (node.op == "aten.mul" or node.args[0].name in values)


def run_shape(node: Node, value: Tensor) -> Tensor:
    assert node.target is not None
    return node.target(*substitute(node.args, lambda _: value), **node.kwargs)
