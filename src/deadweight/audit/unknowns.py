"""Parameters that are almost dead, and the operation that stands in the way of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deadweight.audit.finding import Unknown
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.proof.opsets import CONVOLUTIONS, SHAPE
from deadweight.proof.scale import SCALE_RULES
from deadweight.proof.shift import RULES
from deadweight.proof.turn import TURN_RULES
from deadweight.search.prover import Prover, follow
from deadweight.search.shifts import added_once


def unknowns(prover: Prover) -> Iterator[Unknown]:
    """What no law could take out, and what none could examine: for each parameter the nearest reason."""
    blocked = list(almost_dead(prover))
    named = {unknown.parameter for unknown in blocked}
    yield from blocked
    yield from {u.parameter: u for u in without_rule(prover) if u.parameter not in named}.values()


def almost_dead(prover: Prover) -> Iterator[Unknown]:
    """Biases of keys and values that no law takes out: what blocked them."""
    graph = prover.graph
    for node in prover.parameters():
        addition = added_once(graph, node)
        if not is_vector(node) or addition is None or not behind_linear(graph, addition):
            continue
        for groups, outcome in prover.blocked.get(node.name, []):
            if outcome.blocked is None or taken(prover, node, groups):
                continue
            if "keys or values" in sides(graph, first_readers(graph, node, groups)):
                yield Unknown(graph.parameters[node.name], outcome.blocked.op, outcome.blocked.why)
                break


def behind_linear(graph: Graph, addition: Node) -> bool:
    return any(graph.nodes[n].op in ("linear", "aten.reshape") for n in addition.inputs)


def taken(prover: Prover, node: Node, groups: Tensor) -> bool:
    """Whether some law makes all these elements redundant after all."""
    left = groups != 0
    for claim in prover.claims:
        if claim.node == node.name and isinstance(claim, ShiftClaim) and element_wise(claim):
            left = left & (claim.groups == 0)
    return not bool(left.any())


def first_readers(graph: Graph, node: Node, groups: Tensor) -> list[str]:
    """The operations that first compute with these elements."""
    uses: dict[str, Tensor] = {}
    for reader in graph.users[node.name]:
        follow(graph, reader, {node.name: groups}, uses)
    return [where for where, elements in uses.items() if bool((elements != 0).any())]


def sides(graph: Graph, places: list[str]) -> set[str]:
    """How the values reach a product of two activations, before any other linear map: as which of its operands."""
    result, seen = set[str](), set[str]()
    stack = list(places)
    while stack:
        name, _, place = stack.pop().partition(":")
        node = graph.nodes[name]
        if node.op == "aten.matmul":
            result.add("queries" if place == "0" else "keys or values")
            continue
        if name in seen or node.op == "linear" or node.op in CONVOLUTIONS or adds_stream(graph, node):
            continue
        seen.add(name)
        for reader in graph.users[name]:
            stack += [f"{reader.name}:{i}" for i, n in enumerate(reader.inputs) if n == name]
    return result


def adds_stream(graph: Graph, reader: Node) -> bool:
    """A residual sum ends the way to a head."""
    return reader.op == "aten.add" and len(reader.shape) == 3 and len(reader.inputs) == 2


def without_rule(prover: Prover) -> Iterator[Unknown]:
    """Parameters that an operation reads of which no rule knows how it passes a change on."""
    for node in prover.parameters():
        op = next((op for op in reading_ops(prover.graph, node.name) if not any(op in r for r in EVERY_RULE)), None)
        if op is not None and not taken(prover, node, torch.ones(node.shape, dtype=torch.int64)):
            yield Unknown(prover.graph.parameters[node.name], op, NO_RULE)


EVERY_RULE = (RULES, TURN_RULES, SCALE_RULES)
NO_RULE = "no rule says how this operation passes a change on: what it reads is not examined"


def reading_ops(graph: Graph, name: str) -> Iterator[str]:
    """The operations that compute with a value, behind those that only move its elements."""
    stack, seen = [name], set[str]()
    while stack:
        for reader in graph.users[stack.pop()]:
            if reader.name in seen:
                continue
            seen.add(reader.name)
            if reader.op in SHAPE:
                stack.append(reader.name)
            else:
                yield reader.op
