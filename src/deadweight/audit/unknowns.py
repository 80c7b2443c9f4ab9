"""Parameters that are almost dead, and the operation that blocks the proof of each."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from deadweight.audit.result import Unknown
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.proof.basis import TURN_RULES
from deadweight.proof.operation_groups import CONVOLUTIONS, SHAPE
from deadweight.proof.scale import SCALE_RULES
from deadweight.proof.shift import RULES
from deadweight.search.prover import Prover, first_uses
from deadweight.search.shifts import added_once


def unknowns(prover: Prover) -> Iterator[Unknown]:
    """The parameters that no law can remove or examine, each with the first operation that is the reason."""
    blocked = list(almost_dead(prover))
    named = {unknown.parameter for unknown in blocked}
    yield from blocked
    yield from {u.parameter: u for u in without_rule(prover) if u.parameter not in named}.values()


def almost_dead(prover: Prover) -> Iterator[Unknown]:
    """Biases of keys and values that no law removes, and the operation that blocked the proof."""
    graph = prover.graph
    for node in prover.parameters():
        addition = added_once(graph, node)
        if not is_vector(node) or addition is None or not behind_linear(graph, addition):
            continue
        for groups, outcome in prover.blocked.get(node.name, []):
            if outcome.blocked is None or is_taken(prover, node, groups):
                continue
            if Operand.RIGHT in product_operands(graph, first_readers(graph, node, groups)):
                yield Unknown(graph.parameters[node.name], outcome.blocked.op, outcome.blocked.why)
                break


def behind_linear(graph: Graph, addition: Node) -> bool:
    return any(graph.nodes[n].op in {"linear", "aten.reshape", *CONVOLUTIONS} for n in addition.inputs)


def is_taken(prover: Prover, node: Node, groups: Tensor) -> bool:
    """Whether some law makes all these elements redundant."""
    left = groups != 0
    for claim in prover.claims:
        if claim.node == node.name and isinstance(claim, ShiftClaim) and element_wise(claim):
            left = left & (claim.groups == 0)
    return not bool(left.any())


def first_readers(graph: Graph, node: Node, groups: Tensor) -> list[str]:
    """The operations that first compute with these elements."""
    uses = first_uses(graph, node, groups)
    return [where for where, elements in uses.items() if bool((elements != 0).any())]


class Operand(Enum):
    """A side of a product of two activations: queries or attention weights are left, keys and values right."""

    LEFT, RIGHT = range(2)


def product_operands(graph: Graph, places: list[str]) -> set[Operand]:
    """As which operands the values enter a product of two activations, before any other linear map."""
    result, seen = set[Operand](), set[str]()
    stack = list(places)
    while stack:
        name, _, place = stack.pop().partition(":")
        node = graph.nodes[name]
        if node.op == "aten.matmul":
            result.add(Operand.LEFT if place == "0" else Operand.RIGHT)
            continue
        if name in seen or node.op == "linear" or node.op in CONVOLUTIONS or adds_stream(graph, node):
            continue
        seen.add(name)
        for reader in graph.users[name]:
            stack += [f"{reader.name}:{i}" for i, n in enumerate(reader.inputs) if n == name]
    return result


def adds_stream(graph: Graph, reader: Node) -> bool:
    """Whether this is a residual sum, after which a value no longer belongs to one head."""
    return reader.op == "aten.add" and len(reader.shape) == 3 and len(reader.inputs) == 2


def without_rule(prover: Prover) -> Iterator[Unknown]:
    """Parameters that are read by an operation for which there is no rule."""
    for node in prover.parameters():
        op = next((op for op in reading_ops(prover.graph, node.name) if not any(op in r for r in EVERY_RULE)), None)
        if op is not None and not is_taken(prover, node, torch.ones(node.shape, dtype=torch.int64)):
            yield Unknown(prover.graph.parameters[node.name], op, NO_RULE)


EVERY_RULE = (RULES, TURN_RULES, SCALE_RULES)
NO_RULE = "no rule says how this operation passes a change on: the parameters that it reads are not examined"


def reading_ops(graph: Graph, name: str) -> Iterator[str]:
    """The operations that compute with a value, directly or behind operations that only move its elements."""
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
