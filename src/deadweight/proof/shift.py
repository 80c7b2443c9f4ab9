"""Shift proofs: follow a change of parameters through the graph as a tensor of labels.

Two elements with the same label are shifted by exactly the same amount, for all inputs and weights; label 0 is not
shifted. A rule per operation says how labels travel. The proof succeeds when no output is shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from deadweight.graph.node import Argument, Graph, Node, Ref
from deadweight.proof.absorb import Absorber, find_absorber, readings
from deadweight.proof.identity_labels import Identity
from deadweight.proof.labels import Labels, compact, constant_along, fresh
from deadweight.proof.operation_groups import FREE, KEEPS_REPEATED
from deadweight.proof.replay_limit import LARGEST_REPLAYED
from deadweight.proof.steps import Blocked, Kind, Step, refuse_large

MIXED = -1
Absorbers = Literal["none", "biases", "weights"]  # what may take a constant shift over


@dataclass(frozen=True)
class Shift:
    """By how much each element moves: labels, the source element each comes from, and whether data has a say in it."""

    label: Labels
    source: Tensor  # 0: none, k: the k-th source element alone, MIXED: several
    fixed: bool  # True while the amounts depend on parameters and positions only, never on the model's input

    @property
    def is_zero(self) -> bool:
        return not bool(compact(self.label).any())


@dataclass
class Outcome:
    """What became of a shift: where it was absorbed, the steps, and what blocked it if anything did."""

    steps: list[Step]
    absorbed: dict[str, tuple[Absorber, Labels]]  # by the node where the shift was met
    blocked: Blocked | None = None
    suspects: set[int] = field(default_factory=set)  # source elements whose labels varied where they should not
    lines: Tensor | None = None  # the source elements along the axis of the LayerNorm that blocked
    conditions: set[str] = field(default_factory=set)  # in words, what a rule took for granted

    @property
    def proved(self) -> bool:
        return self.blocked is None


Rule = Callable[["ShiftWalk", Node], Any]
RULES: dict[str, Rule] = {}


def shift_rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule; the first line of its docstring is its theorem."""

    def register(function: Rule) -> Rule:
        assert function.__doc__, function
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


class ShiftWalk:
    """One walk: from shifted sources to the outputs, or to the node that blocks."""

    def __init__(
        self,
        graph: Graph,
        identity: Identity,
        sources: dict[str, Shift],
        exclude: frozenset[str] = frozenset(),
        *,
        absorbers: Absorbers = "none",
    ) -> None:
        self.graph, self.identity, self.sources, self.exclude = graph, identity, sources, exclude
        self.absorbers = absorbers
        self.shifts: dict[str, Any] = {}
        self.outcome = Outcome([], {})
        self.promised: dict[str, tuple[Labels, set[str]]] = {}  # shared absorbers: by how much they move, and where

    def run(self) -> Outcome:
        try:
            for node in self.graph.downstream(self.sources, self.shifts.__contains__):
                self.visit(node)
            self.check_promises()
            self.check_outputs()
        except Blocked as blocked:
            self.outcome.blocked = blocked.with_traceback(None)  # its frames would keep every label alive
        return self.outcome

    def visit(self, node: Node) -> None:
        if node.name in self.sources:
            if any(name in self.shifts for name in node.inputs):
                raise Blocked(node.name, node.op, "what it reads moves as well")
            self.shifts[node.name] = self.sources[node.name]
            self.note(node, "the parameter is changed here", self.sources[node.name], "starts")
            if node.op == "parameter":
                return
        elif not any(name in self.shifts for name in node.inputs):
            return
        else:
            self.step(node)
        self.absorb(node)

    def step(self, node: Node) -> None:
        rule = RULES.get(node.op)
        if rule is None:
            raise Blocked(node.name, node.op, "no rule says how this operation passes a shift on")
        if node.op not in FREE | KEEPS_REPEATED:
            refuse_large(node)
        result = rule(self, node)
        if isinstance(result, Shift) and result.is_zero:
            result = None
        if result is not None:
            self.shifts[node.name] = result
        self.note(node, theorem(rule), result)

    def note(self, node: Node, rule: str, value: Any, kind: Kind = "passes") -> None:
        self.outcome.steps.append(Step(node.name, node.op, rule, describe(value), kept(value), kind))

    def get(self, value: Argument) -> Shift | None:
        """The shift of an argument, if it is a shifted node."""
        found = self.shifts.get(value.name) if isinstance(value, Ref) else None
        return found if isinstance(found, Shift) else None

    def depends_on_input(self, value: Argument) -> bool:
        return isinstance(value, Ref) and self.graph.depends[value.name][1]

    def absorb(self, node: Node) -> None:
        """A shift that is the same for all inputs and meets a free parameter added at the same place ends there."""
        shift = self.shifts.get(node.name)
        if self.absorbers == "none" or not isinstance(shift, Shift) or not shift.fixed:
            return
        taken = frozenset(self.shifts) | self.exclude
        for absorber in find_absorber(self.graph, node, taken, weights=self.absorbers == "weights"):
            amounts = absorber.amounts(shift.label)
            if amounts is not None and (not absorber.shared or self.promise(absorber, amounts)):
                again = absorber.shared and len(self.promised[absorber.parameter][1]) > len(absorber.operands)
                self.outcome.absorbed[node.name] = (replace(absorber, again=again), amounts)
                del self.shifts[node.name]
                self.note(node, f"the same for every input: {absorber.words()} takes it over", None, "absorbed")
                return

    def promise(self, absorber: Absorber, amounts: Labels) -> bool:
        """A parameter of several layers may move by these amounts, if it moves by no other anywhere."""
        known, places = self.promised.get(absorber.parameter, (amounts, set[str]()))
        if not torch.equal(known, amounts):
            return False
        self.promised[absorber.parameter] = (known, places | absorber.operands)
        return True

    def check_promises(self) -> None:
        """What takes a shift over at one place must be wanted, by the same amounts, wherever else it is added."""
        for parameter, (_, places) in self.promised.items():
            if not set(readings(self.graph, parameter)) <= places:
                self.outcome.absorbed.clear()
                raise Blocked(parameter, "parameter", "it is added elsewhere too, where nothing is to be taken over")

    def check_outputs(self) -> None:
        for name in self.graph.outputs:
            if name in self.shifts:
                raise Blocked(name, "output", "the shift reaches the output")


@shift_rule("output")
def reaches_output(walk: ShiftWalk, node: Node) -> None:
    """What is returned may not be shifted."""
    raise Blocked(node.args[0].name, "output", "the shift reaches the output")


def kept(value: Any) -> Any:
    """What a step remembers: the labels themselves where they are small enough to replay, else only that it moved."""
    if isinstance(value, Shift) and value.label.numel() > LARGEST_REPLAYED:
        return True
    large = isinstance(value, list) and any(isinstance(v, Shift) and v.label.numel() > LARGEST_REPLAYED for v in value)
    return True if large else value


def theorem(rule: Rule) -> str:
    return (rule.__doc__ or "").strip().splitlines()[0].rstrip(".")


def describe(value: Any) -> str:
    if value is None:
        return "not shifted any more"
    if not isinstance(value, Shift):
        return "shifted"
    axes = [a for a in range(value.label.ndim) if value.label.shape[a] > 1]
    same = [str(a) for a in axes if constant_along(value.label, (a,))]
    text = f"shifted equally along axis {', '.join(same)}" if same else "shifted"
    return text if value.fixed else text + ", by an amount that depends on the input"


def merge_sources(a: Tensor, b: Tensor) -> Tensor:
    """Where each element's shift comes from, of two that are added (of one shape)."""
    shape, a, b = a.shape, compact(a), compact(b)
    mixed = torch.where(a == b, a, torch.full((), MIXED, dtype=a.dtype))
    return torch.where(a == 0, b, torch.where(b == 0, a, mixed)).expand(shape)


def with_label(shift: Shift, label: Labels, *, fixed: bool = True) -> Shift:
    return replace(shift, label=label, source=shift.source.expand(label.shape), fixed=shift.fixed and fixed)


def unknown_labels(node: Node) -> Shift:
    """Nothing is claimed equal, nothing zero: always sound for an operation that is linear in what is shifted."""
    refuse_large(node)
    return Shift(fresh(node.shape, node.name, "moved"), torch.full(node.shape, MIXED, dtype=torch.int32), False)
