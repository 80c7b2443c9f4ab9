"""Outputs as readers of what they return."""

from __future__ import annotations

import dataclasses
from typing import Any

from deadweight.graph.node import Graph, Node, Ref

RETURNED = "output"  # the operation that reads an output


def returned(graph: Graph) -> Graph:
    """What is returned is read: an output that others read too, or of parameters alone, gets a reader of its own."""
    nodes, outputs = dict(graph.nodes), []
    for name in graph.outputs:
        node = nodes[name]
        if graph.users[name] or not graph.depends[name][1]:
            node = Node(f"{name}_returned", RETURNED, itself, (Ref(name),), {}, node.shape, node.dtype)
            nodes[node.name] = node
        outputs.append(node.name)
    return dataclasses.replace(graph, nodes=nodes, outputs=tuple(outputs))


def itself(value: Any) -> Any:
    return value
