"""Basis proofs: turn a space by one matrix, follow it through the graph, and see which matrices survive.

Writers (linear maps, tables, biases) produce vectors of the space and turn with it; readers (linear maps) undo the
turn. What stands between them narrows the group: a norm to rotations, a ReLU or a gate to scales of single
coordinates, factors that differ between heads to one block per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deadweight.graph.node import Argument, Node, Ref
from deadweight.proof import field as exact
from deadweight.proof.identity_labels import Identity
from deadweight.proof.labels import fold, fresh
from deadweight.proof.linear_form import Form, Slot, lines
from deadweight.proof.steps import Blocked, Step, refuse_large
from deadweight.proof.weights import WeightView, groups_of, uses_of


@dataclass(frozen=True)
class Site:
    """A parameter that moves when the space turns.

    out: it produces the space along `axis`; behind: likewise, before a per-channel factor; in: it reads the space
    along `axis`; gain: it multiplies coordinates.
    `coordinate` names the coordinate at each index of that axis (0: none), `copy` which copy of the space it is.
    """

    parameter: str
    role: str
    axis: int
    coordinate: Tensor
    copy: Tensor | None = None
    gain: str | None = None  # node of a per-channel factor between the space and the parameter
    expert: int | None = None  # the parameter's axis of experts, where each has a space of its own
    value: str | None = None  # for a gain: the node whose value is multiplied
    power: int = 1  # where the space stands raised to a power: single coordinates only, s acts as s to this power


class NeedsWriters(Blocked):
    """Unturned values are added to turned ones: whatever writes them must turn too."""

    def __init__(self, missing: dict[str, str]) -> None:
        other, node = next(iter(missing.items()))
        super().__init__(node, "aten.add", f"{other} is added and does not turn along")
        self.missing = tuple(missing)


class DifferentGains(Blocked):
    """Values behind different gains are added: the space of the sum may turn, the space before a gain only scale."""


@dataclass
class Contraction:
    """Two turned values multiplied along their coordinates."""

    node: str
    left: Form
    right: Form


@dataclass
class Turned:
    """What a turn came to: who moved, what it went through, and the group that is left."""

    size: int
    blocks: Tensor  # block number per coordinate (index 0 unused)
    sites: list[Site] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    norms: list[Form] = field(default_factory=list)  # of heads, before they meet: each must keep its length
    rotations: bool = False  # a norm allows rotations only
    fixes_ones: bool = False  # LayerNorm: and only those that keep the mean direction
    pointwise: bool = False  # some operation acts on single coordinates: scales of these at most are left
    epsilon: float | None = None  # a scale of the whole space dies in a norm, up to this ε
    touched: set[str] = field(default_factory=set)
    blocked: Blocked | None = None

    @property
    def proved(self) -> bool:
        return self.blocked is None

    def split(self, keys: Tensor) -> None:
        """Only coordinates with the same key may still be mixed with each other."""
        pairs = torch.stack([self.blocks, keys], 1)
        self.blocks = torch.unique(pairs, dim=0, return_inverse=True)[1]

    @property
    def powers(self) -> bool:
        """Whether some parameter moves by a power of the scale: scales of single coordinates only."""
        return any(site.power != 1 for site in self.sites)

    def single_coordinates(self) -> None:
        self.pointwise = True
        self.blocks = torch.arange(1, len(self.blocks) + 1)

    def block_sizes(self) -> list[int]:
        present = torch.zeros(len(self.blocks), dtype=torch.bool)
        for site in self.sites:
            present[site.coordinate.reshape(-1)] = True
        present[0] = False
        return torch.unique(self.blocks[present], return_counts=True)[1].tolist()


TurnRule = Callable[["TurnWalk", Node], Any]
TURN_RULES: dict[str, TurnRule] = {}


def turn_rule(*ops: str) -> Callable[[TurnRule], TurnRule]:
    def register(function: TurnRule) -> TurnRule:
        assert function.__doc__, function
        TURN_RULES.update(dict.fromkeys(ops, function))
        return function

    return register


@dataclass(frozen=True)
class WalkOptions:
    """Which changes of basis a walk follows; by default any matrix, until an operation allows fewer."""

    scalar: bool = False  # one scale of the whole space, and nothing else
    contracts: bool = False  # queries and keys that meet in a product end the walk: the product is noted
    powers: bool = False  # scales of single coordinates pass whole powers
    gains: bool = True  # scales of single coordinates pass sums of values behind different gains


class TurnWalk:
    """One walk from writers to readers. `writers` gives coordinates at a node's value (0: not in the space)."""

    def __init__(
        self,
        identity: Identity,
        writers: dict[str, Tensor],
        sites: Iterable[Site],
        size: int,
        options: WalkOptions,
        *,
        within: set[str] | None = None,
        expert: str | None = None,
    ) -> None:
        self.graph, self.identity, self.writers = identity.graph, identity, writers
        self.within, self.expert = within, expert
        self.scalar, self.contracts = options.scalar, options.contracts
        self.powers, self.gains = options.powers, options.gains
        self.forms: dict[str, Any] = {}
        self.turned = Turned(size, torch.zeros(size + 1, dtype=torch.int64), list(sites))
        self.readings: dict[str, list[Site]] = {}
        self.added: dict[str, list[tuple[Site, str, str]]] = {}  # biases: how each use turns, what is added and where
        present = torch.cat([coordinate.reshape(-1) for coordinate in writers.values()]).unique()
        self.width = int((present != 0).sum())  # how many coordinates there are: a part of a fused map has fewer
        self.missing: dict[str, str] = {}  # values added to the space whose writers do not turn yet: where

    def run(self) -> Turned:
        try:
            for node in self.graph.downstream(self.writers, self.forms.__contains__):
                self.visit(node)
            for name in self.graph.outputs:
                if name in self.forms:
                    raise Blocked(name, "output", "the turned value is the model's output")
            self.check_added()
            if not self.missing:
                self.check_readings()
        except Blocked as blocked:
            self.turned.blocked = blocked.with_traceback(None)  # its frames would keep every form alive
        if self.missing and self.turned.blocked is None:
            self.turned.blocked = NeedsWriters(self.missing)
        return self.turned

    def visit(self, node: Node) -> None:
        if self.within is not None and node.name not in self.within and node.name not in self.writers:
            return
        if node.name in self.writers:
            if any(name in self.forms for name in node.inputs):
                self.step(node)  # a writer that reads the space itself
            self.start(node)
        elif any(name in self.forms for name in node.inputs):
            self.step(node)

    def start(self, node: Node) -> None:
        """Every position's vector gets a factor of its own, common to its coordinates."""
        coordinate = self.writers[node.name].expand(node.shape)
        own = fresh(one_for_each_vector(node, self.writers[node.name]), node.name, "vector")
        if groups_of(node) != 1:
            self.turned.single_coordinates()  # its kernels read different channels: they scale, and mix nothing
        if node.op.startswith("aten.conv"):
            own = fresh((node.shape[0], 1, *node.shape[2:]), node.name, "vector")
        factor = exact.generic(own).expand(node.shape)
        slot = Slot(coordinate, torch.where(coordinate == 0, 0, factor))
        self.forms[node.name] = Form((slot,), expert=self.expert)
        self.note(node, "the space is written here", self.forms[node.name])

    def step(self, node: Node) -> None:
        rule = TURN_RULES.get(node.op)
        if rule is None:
            raise Blocked(node.name, node.op, "no rule says how this operation passes a change of basis on")
        refuse_large(node)
        form = rule(self, node)
        if isinstance(form, Form) and not any(bool((s.coordinate != 0).any()) for s in form.slots):
            form = None  # only elements outside the space are left
        if form is not None:
            self.forms[node.name] = form
        self.note(node, (rule.__doc__ or "").strip().splitlines()[0].rstrip("."), form)

    def note(self, node: Node, rule: str, form: Any) -> None:
        self.turned.touched.add(node.name)
        words = "undone: the change of basis ends here" if form is None else "turned alike"
        self.turned.steps.append(Step(node.name, node.op, rule, words, None if form is None else True))

    def get(self, value: Argument) -> Form | None:
        found = self.forms.get(value.name) if isinstance(value, Ref) else None
        return found if isinstance(found, Form) else None

    def numbers_of(self, ref: Ref) -> exact.Elements:
        """What stands for a value that is not turned: one random element for each of its numbers, with its sign."""
        node = self.graph.node(ref)
        if node.op == "aten.neg" and isinstance(node.args[0], Ref):
            return exact.negative(self.numbers_of(node.args[0]))
        return exact.generic(self.identity.of(ref))

    def read(self, node: Node, view: WeightView, axis: int, form: Form) -> None:
        """A linear map reads the space: it undoes the turn, copy by copy."""
        slot = form.single
        if slot is None:
            raise Blocked(node.name, node.op, "it reads sums of several coordinates")
        coordinate, factor = lines(slot)
        if not torch.equal(coordinate, coordinate[:1].expand_as(coordinate)):
            raise Blocked(node.name, node.op, "the coordinates it reads differ from position to position")
        copies = copies_of(coordinate[0], factor)
        expert = expert_axis(node, view, form)
        site = Site(view.parameter, "in", axis, coordinate[0], copies, form.gain, expert, power=form.power)
        self.readings.setdefault(view.parameter, []).append(site)
        if not self.scalar:
            self.turned.split(signatures(coordinate[0], copies, self.turned.size))

    def check_readings(self) -> None:
        """A weight read several times must read the same way each time, and nobody else may read it."""
        for parameter, sites in self.readings.items():
            first = sites[0]
            uses = sum(1 for _ in uses_of(self.graph, parameter))
            if not all(self.read_alike(s, first) for s in sites) or len(sites) != uses:
                raise Blocked(parameter, "parameter", "it is read elsewhere too (tied or shared)")
            self.turned.sites.append(first)

    def read_alike(self, a: Site, b: Site) -> bool:
        """Whether what undoes the turn at one reading does so at the other: the same columns, copies and gain."""
        if (a.axis, a.power, a.expert) != (b.axis, b.power, b.expert) or not torch.equal(a.coordinate, b.coordinate):
            return False
        gains = a.gain == b.gain or (
            a.gain and b.gain and torch.equal(*(self.identity.of(g) for g in (a.gain, b.gain)))
        )
        assert a.copy is not None and b.copy is not None
        return bool(gains) and torch.equal(renumbered(a.copy), renumbered(b.copy))

    def check_added(self) -> None:
        """A bias that is added at several places turns if it turns alike at all of them, and nobody else reads it."""
        for parameter, places in self.added.items():
            first = places[0][0]
            uses = sum(1 for _ in uses_of(self.graph, parameter))
            alike = all(
                torch.equal(s.coordinate, first.coordinate)
                and same_copies(s.copy, first.copy)
                and (s.axis, s.gain, s.power) == (first.axis, first.gain, first.power)
                for s, _, _ in places
            )
            if alike and len(places) == uses:
                self.turned.sites.append(first)
            else:
                self.missing |= {other: node for _, other, node in places}


def one_for_each_vector(node: Node, coordinate: Tensor) -> tuple[int, ...]:
    """The shape of a number for each vector: the last axis is that of the channels, unless coordinates say another."""
    long = [a - coordinate.ndim for a, n in enumerate(coordinate.shape) if n > 1]
    channel = long[0] if node.op == "aten.mul" and len(long) == 1 else -1
    return tuple(1 if a == len(node.shape) + channel else n for a, n in enumerate(node.shape))


def expert_of(node: Node) -> str:
    """How the rows of an experts node find their expert: the index, or their place."""
    return node.args[2].name if isinstance(node.args[2], Ref) else ""


def expert_axis(node: Node, view: WeightView, form: Form) -> int | None:
    """A space of each expert must be read by that expert's own matrix; a common one by all of them alike."""
    if form.expert is None:
        return None
    if view.expert is None or expert_of(node) != form.expert:
        raise Blocked(node.name, node.op, "it reads the spaces of several experts by one matrix")
    return view.expert


def copies_of(coordinate: Tensor, factor: Tensor) -> Tensor:
    """A number per column: one copy has equal factors, and every coordinate once at most."""
    alike = torch.unique(fold(factor + 1, 0), return_inverse=True)[1]  # + 1: a label of 0 would vanish
    seen: dict[tuple[int, int], int] = {}
    repeats = []
    for key in zip(alike.tolist(), coordinate.tolist(), strict=True):
        seen[key] = seen.get(key, -1) + 1
        repeats.append(seen[key])
    return torch.unique(torch.stack([alike, torch.tensor(repeats)]), dim=1, return_inverse=True)[1]


def same_copies(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two uses see the same numbers as copies of the same vectors."""
    if a is None or b is None:
        return a is b
    return torch.equal(renumbered(a), renumbered(b))


def renumbered(copies: Tensor) -> Tensor:
    """The same classes, numbered in the order in which they begin."""
    first: dict[int, int] = {}
    return torch.tensor([first.setdefault(copy, len(first)) for copy in copies.tolist()])


def signatures(coordinate: Tensor, copies: Tensor, size: int) -> Tensor:
    """Per coordinate, a number for the set of copies in which it is read."""
    total = torch.zeros(size + 1, dtype=torch.int64)
    own = fresh((int(copies.max()) + 1,), "copy")[copies]
    total.index_add_(0, coordinate, own)
    return total
