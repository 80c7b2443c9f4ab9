"""Counting what the search claims of a small module, and holding every part of it against the module's own Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.audit.account import Account, flatten, make_account
from deadweight.audit.checker import replay, structure
from deadweight.claims.claim import Claim
from deadweight.claims.contraction_claim import ContractionClaim
from deadweight.claims.point import Point, Values
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.pieces import stored_part
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import every_law, search
from deadweight.reduce.apply import Weights, apply_one
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone
from deadweight.save.facts import Constant, Fact, IdentityBlocks, Passed, holds
from deadweight.source.randomise import randomise

torch.set_num_threads(1)  # the modules are tiny: more threads only wait for each other

OUTSIDE = 1e-9  # of a direction of length one, outside the span of the claim's motions: rounding leaves about 1e-14
STAYS = 1e-8  # of outputs of order one, after a rewrite that may make rounding errors of 1e-16 a thousand times larger
EXACT = 1e-10  # a norm's ε up to which its scale counts as redundant in the measure too


class Odd(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if type(part) is Tensor else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


@dataclass(frozen=True)
class Census:
    """What the search claims of one module, and how much is redundant by measure."""

    graph: Graph
    claims: list[Claim]
    counted: Account

    @property
    def findings(self) -> dict[str, int]:
        """Dimensions by law and parameter: "DW002 k.bias", or "DW002 k.bias[4:8]" for a part of it."""
        total: dict[str, int] = {}
        for claim in self.claims:
            key = f"{claim.code} {self.graph.parameters[claim.node]}{part_of(claim)}"
            total[key] = total.get(key, 0) + claim.dof
        return total

    @property
    def measured(self) -> int:
        return self.counted.completeness.measured

    @property
    def unexplained(self) -> int:
        return self.measured - self.counted.completeness.explained


def part_of(claim: Claim) -> str:
    """The part of the parameter that a claim speaks of, as one would write it: [4:8], or [:, 0,2] for columns."""
    if claim.index is None:
        return ""
    numbers = claim.index.tolist()
    joined = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}:{numbers[-1] + 1}" if joined else ",".join(map(str, numbers))
    return "[" + ":, " * claim.axis + text + "]"


@pytest.fixture
def census() -> Callable[..., Census]:
    """Search a module made of a forward function and its parts; no claim may be false or count anything twice.

    `short` is by how much the counts stay below what the claims move: linked gauges are not always solved for.
    """

    def run(forward: Callable, *inputs: Tensor, training: bool = False, short: int = 0, **parts: Any) -> Census:
        torch.manual_seed(0)
        module = Odd(forward, **parts).train(training)
        graph = canonical(trace(module, inputs))
        claims = search(graph).claims
        values, draw = random_values(graph, module), drawing(graph, inputs)
        counted = make_account(graph, values, draw, claims, most_inputs=300)
        assert not counted.unsound, [(c.code, graph.parameters[c.node], e) for c, e in counted.unsound]
        assert not structure(graph, claims)
        point = Point(graph, values, draw(2))
        assert replay(claims, point).faults == {}
        assert all(well_described(claim, point) for claim in claims)
        inexact = sum(c.dof for c in claims if c.tier == "epsilon" and c.epsilon > EXACT)
        assert sum(c.dof for c in claims) - inexact + short == counted.completeness.explained
        return Census(graph, claims, counted)

    return run


def random_values(graph: Graph, module: nn.Module) -> Values:
    random = randomise(module, 0)
    values = {n: t.detach().double() if t.is_floating_point() else t for n, t in graph.tensors.items()}
    stored = {node: random.get_parameter(name).detach() for node, name in graph.parameters.items()}
    drawn = {node: stored_part(graph, node, tensor) for node, tensor in stored.items()}
    return values | {n: t for n, t in drawn.items() if t.is_floating_point()}


def drawing(graph: Graph, inputs: tuple[Tensor, ...]) -> Callable[[int], Values]:
    """Random inputs like the example: whole numbers up to the largest of them."""

    def draw(seed: int) -> Values:
        generator = torch.Generator().manual_seed(seed)
        drawn = [
            torch.randn(x.shape, generator=generator)
            if x.is_floating_point()
            else torch.randint(0, int(x.max()) + 1, x.shape, generator=generator)
            for x in inputs
        ]
        return bind(graph, tuple(drawn), {})

    return draw


def well_described(claim: Claim, point: Point) -> bool:
    """A claim names what its motions move, and its random direction is one of them."""
    direction = claim.direction(point, torch.Generator().manual_seed(3))
    order = sorted(n for n in point.graph.parameters if point.values[n].is_floating_point())
    motions = torch.stack([flatten(m, point.values, order) for m in claim.motions(point)], 1)
    along = flatten(direction, point.values, order)
    left = along - motions @ torch.linalg.lstsq(motions, along[:, None], driver="gelsd").solution[:, 0]
    assert float(left.norm()) < OUTSIDE * float(along.norm()), (claim, float(left.norm()))
    moved = {n for n, t in direction.items() if bool(t.any())}
    fused = isinstance(claim, ContractionClaim)  # queries and keys may be parts of one parameter
    assert moved <= {claim.node, *claim.into}, (claim.node, claim.into, moved)
    assert fused or claim.node not in claim.into, (claim.node, claim.into)
    return len(set(claim.into)) == len(claim.into)


@dataclass(frozen=True)
class Carried:
    """What the rewrites of a module say of its weights afterwards, and which are not done, with the reason."""

    facts: list[Fact]
    refused: dict[str, str]

    @property
    def words(self) -> list[str]:
        """The facts, without the places that a rewrite is free to choose."""
        return [in_words(fact) for fact in self.facts]


def in_words(fact: Fact) -> str:
    if isinstance(fact, Passed):
        return f"{fact.module} only adds its shift behind {fact.before}"
    if isinstance(fact, Constant):
        return f"{fact.parameter} = {fact.value:g}, {fact.because}"
    if isinstance(fact, IdentityBlocks):
        size = "whole" if fact.whole else f"at {fact.blocks} of axis {fact.axis}"
        return f"{fact.parameter} is the identity, {size}"
    rows = "" if fact.others is None else f" in {fact.others}"
    places = "one place" if len(fact.places) == 1 else f"{fact.places}"
    return f"{fact.parameter} is zero at {places} of axis {fact.axis}{rows}, {fact.because}"


@pytest.fixture
def carried_out() -> Callable[..., Carried]:
    """Carry every claim out on random weights, in the order of the laws; the outputs must stay, and facts must hold."""

    def run(
        forward: Callable, *inputs: Tensor, only: str = "DW", alter: Callable | None = None, **parts: Any
    ) -> Carried:
        torch.manual_seed(0)
        module = Odd(forward, **parts).eval()
        graph = canonical(trace(module, inputs))
        values = random_values(graph, module)
        if alter is not None:
            alter({graph.stored_name(n): t for n, t in values.items() if n in graph.parameters or n in graph.buffers})
        point = Point(graph, values, drawing(graph, inputs)(2))
        carried, weights = Carried([], {}), Weights(lambda name: values[node_of(graph, name)])
        known = SettledFacts()
        pairs = [(every_law().law_of(c), c) for c in search(graph).claims if c.code.startswith(only)]
        for law, claim in sorted(pairs, key=lambda p: (p[0].order_of_rewriting, -len(graph.nodes[p[1].node].shape))):
            key = f"{claim.code} {graph.parameters[claim.node]}{part_of(claim)}"
            try:
                rewrite = law.rewrite(graph, claim, stock=False)
            except NotDone as why:
                carried.refused[key] = str(why)
                continue
            object.__setattr__(rewrite, "names", {graph.stored_name(n): graph.stored_name(n) for n in rewrite.nodes})
            outcome = apply_one(rewrite, weights, known)
            if outcome.skipped is not None:
                carried.refused[key] = outcome.skipped.why
            known = known.and_also(outcome.facts)
            carried.facts.extend(outcome.facts)
            assert_same_outputs(point, weights)
        for fact in carried.facts:
            assert isinstance(fact, Passed) or holds(fact, weights[fact.parameter]), fact
        return carried

    return run


def node_of(graph: Graph, name: str) -> str:
    return next(n for n in (*graph.parameters, *graph.buffers) if graph.stored_name(n) == name)


def assert_same_outputs(point: Point, weights: Weights) -> None:
    moved = point.at({node_of(point.graph, name): weights[name] for name in weights})
    for new, old in zip(moved.outputs, point.outputs, strict=True):
        assert float((new - old).abs().max()) < STAYS
