"""Parameters that are almost dead, and the operation that stands in the way of each."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.audit.finding import Unknown
from deadweight.graph.node import Graph, Node
from deadweight.laws.prover import Prover
from deadweight.laws.shifts import added_once, is_vector
from deadweight.proof.opsets import CONVOLUTIONS


def unknowns(prover: Prover) -> Iterator[Unknown]:
    """Biases of keys and values that no law takes out: what blocked them."""
    graph = prover.graph
    for node in prover.parameters():
        outcomes = prover.blocked.get(node.name, [])
        if not outcomes or not is_vector(node) or not feeds_attention(graph, node):
            continue
        if any(c.node == node.name and c.elements is None and c.code in ("DW002", "DW003") for c in prover.claims):
            continue
        blocked = next((o.blocked for o in outcomes if o.blocked is not None), None)
        if blocked is not None:
            yield Unknown(graph.parameters[node.name], blocked.op, blocked.why)


def feeds_attention(graph: Graph, node: Node) -> bool:
    """Whether a bias reaches a product of two activations as keys or values, before any other linear map."""
    start = added_once(graph, node)
    if start is None or not any(graph.nodes[n].op == "linear" for n in start.inputs):
        return False
    stack, seen = [start.name], set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        for reader in graph.users[name]:
            if reader.op == "aten.matmul":
                if len(reader.args) > 1 and reader.args[1].name == name:
                    return True
            elif reader.op != "linear" and reader.op not in CONVOLUTIONS and not adds_stream(graph, reader):
                stack.append(reader.name)
    return False


def adds_stream(graph: Graph, reader: Node) -> bool:
    """A residual sum ends the way to a head."""
    return reader.op == "aten.add" and len(reader.shape) == 3 and len(reader.inputs) == 2
