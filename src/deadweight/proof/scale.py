"""Scale proofs: multiply parts of a parameter by positive numbers, and follow the factors through the graph.

The factor at each element is s₁^a₁·s₂^a₂·…, a product of powers of the parts' scales. It is kept as a label: an element
of the field, Σ aₖ·rₖ with a random rₖ for each part. Factors multiply, so labels add; label 0 is the factor 1. Two
different products of powers share a label with probability 2⁻⁶¹. The proof succeeds when every factor has become 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof import field as exact
from deadweight.proof.labels import compact
from deadweight.proof.operation_groups import HOMOGENEOUS_ACTIVATIONS, SHAPE
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked, Step

ScaleRule = Callable[["ScaleWalk", Node], Tensor]
SCALE_RULES: dict[str, ScaleRule] = {}


def scale_rule(*ops: str) -> Callable[[ScaleRule], ScaleRule]:
    def register(function: ScaleRule) -> ScaleRule:
        assert function.__doc__, function
        SCALE_RULES.update(dict.fromkeys(ops, function))
        return function

    return register


@dataclass
class Scaled:
    """What became of the scales: the steps, the largest ε of a norm that ended one, and what blocked them."""

    steps: list[Step] = field(default_factory=list)
    epsilon: float = 0.0
    blocked: Blocked | None = None

    @property
    def proved(self) -> bool:
        return self.blocked is None


class ScaleWalk:
    """One walk from a scaled parameter; whatever depends on the model's input must not be scaled any more."""

    def __init__(self, graph: Graph, source: str, parts: Tensor) -> None:
        self.graph, self.source = graph, source
        short = compact(parts)
        self.labels: dict[str, Tensor] = {source: torch.where(short == 0, 0, exact.generic(short)).expand(parts.shape)}
        self.scaled = Scaled()

    def run(self) -> Scaled:
        try:
            for node in self.graph.downstream([self.source], self.labels.__contains__):
                if node.name != self.source:
                    self.step(node)
        except Blocked as blocked:
            self.scaled.blocked = blocked.with_traceback(None)
        return self.scaled

    def step(self, node: Node) -> None:
        rule = SCALE_RULES.get(node.op)
        if rule is None or self.graph.depends[node.name][1]:
            raise Blocked(node.name, node.op, "no rule says how this operation passes a scale on")
        label = rule(self, node).expand(node.shape)
        theorem = (rule.__doc__ or "").strip().splitlines()[0].rstrip(".")
        if not bool((label != 0).any()):
            self.scaled.steps.append(Step(node.name, node.op, theorem, "not scaled any more"))
            return
        self.labels[node.name] = label
        self.scaled.steps.append(Step(node.name, node.op, theorem, "scaled", True))

    def of(self, value: object) -> Tensor:
        """The label of an operand; 0 for what is not scaled."""
        if not isinstance(value, Ref):
            return torch.zeros((), dtype=torch.int64)
        found = self.labels.get(value.name)
        return torch.zeros(self.graph.node(value).shape, dtype=torch.int64) if found is None else found


@scale_rule(*(SHAPE - {"getitem"}))
def shape(walk: ScaleWalk, node: Node) -> Tensor:
    """It moves elements, each with its factor."""
    result = move(walk.graph, node, lambda name: walk.of(Ref(name)))
    if not isinstance(result, Tensor):
        raise Blocked(node.name, node.op, "it has several results")
    return result


@scale_rule("aten.mul")
def product(walk: ScaleWalk, node: Node) -> Tensor:
    """The factors of a product multiply."""
    return exact.plus(walk.of(node.args[0]), walk.of(node.args[1]))


@scale_rule("aten.div")
def quotient(walk: ScaleWalk, node: Node) -> Tensor:
    """The factors of a quotient divide."""
    if node.kwargs:
        raise Blocked(node.name, node.op, "the quotient is rounded")
    return exact.minus(walk.of(node.args[0]), walk.of(node.args[1]))


@scale_rule("aten.add", "aten.sub")
def addition(walk: ScaleWalk, node: Node) -> Tensor:
    """A sum of equally scaled numbers is scaled as they are."""
    left, right = (walk.of(a).expand(node.shape) for a in node.args[:2])
    if not torch.equal(left, right):
        raise Blocked(node.name, node.op, "it adds numbers that are scaled differently")
    return left


@scale_rule("aten.neg", *HOMOGENEOUS_ACTIVATIONS)
def homogeneous(walk: ScaleWalk, node: Node) -> Tensor:
    """f(s·x) = s·f(x) for s > 0."""
    return walk.of(node.args[0])


POWERS = {"aten.sqrt": 0.5, "aten.rsqrt": -0.5, "aten.reciprocal": -1, "aten.square": 2}


@scale_rule(*POWERS, "aten.pow")
def power(walk: ScaleWalk, node: Node) -> Tensor:
    """(s·x)^k = s^k·x^k for s > 0."""
    exponent = node.args[1] if node.op == "aten.pow" else POWERS[node.op]
    if isinstance(exponent, (Ref, bool)) or not isinstance(node.args[0], Ref):
        raise Blocked(node.name, node.op, "the exponent is no constant")
    return exact.times(walk.of(node.args[0]), exact.of(exponent))


@scale_rule("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.linalg_vector_norm", "aten.norm")
def reduction(walk: ScaleWalk, node: Node) -> Tensor:
    """Sums, means, maxima and norms of equally scaled numbers are scaled as they are."""
    label = walk.of(node.args[0])
    place = 2 if "norm" in node.op else 1
    if "norm" in node.op and 0 in node.args[1:2]:
        raise Blocked(node.name, node.op, "it counts what is not zero")
    axes = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    axes = [axes] if isinstance(axes, int) else axes or list(range(label.ndim))
    return constant(node, label, tuple(axes)).reshape(node.shape)


def constant(node: Node, label: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The label along axes on which it does not vary, each of length one."""
    for axis in axes:
        first = label.narrow(axis, 0, 1)
        if not torch.equal(label, first.expand_as(label)):
            raise Blocked(node.name, node.op, "it joins numbers that are scaled differently")
        label = first
    return label


@scale_rule("aten.mv", "aten.dot", "aten.vdot", "aten.matmul", "linear")
def contraction(walk: ScaleWalk, node: Node) -> Tensor:
    """Σ x·y is scaled by the product of both factors, if neither varies along the sum."""
    left, right = walk.of(node.args[0]), walk.of(node.args[1])
    if left.ndim > 2 or right.ndim > 2:
        raise Blocked(node.name, node.op, "it multiplies stacks of matrices")
    right = right.T if node.op == "linear" else right
    rows = constant(node, left, (-1,)).squeeze(-1)
    columns = constant(node, right, (0,)).squeeze(0)
    total = exact.plus(rows.reshape([*rows.shape, *[1] * columns.ndim]), columns)
    return total.reshape(node.shape)


@scale_rule("core.layer", "core.rms", "core.unit", "core.batch", "core.instance", "core.group")
def norm(walk: ScaleWalk, node: Node) -> Tensor:
    """A norm ignores a common positive factor of what it normalises, up to its ε."""
    label = walk.of(node.args[0])
    axes: tuple[int, ...] = (-1,)
    if node.op == "core.group":
        label = label.reshape(label.shape[0], node.args[1], -1)
    elif node.op == "core.batch":
        axes = tuple(a for a in range(label.ndim) if a != 1)
    else:
        axes = tuple(range(2, label.ndim)) if node.op == "core.instance" else tuple(range(-node.args[1], 0))
    constant(node, label, axes)
    walk.scaled.epsilon = max(walk.scaled.epsilon, float(node.args[-1]))
    return torch.zeros(node.shape, dtype=torch.int64)
