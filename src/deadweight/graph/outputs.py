"""Outputs as nodes that read what they return."""

from __future__ import annotations

import dataclasses

from deadweight.graph.node import Graph, Node, Ref, Value

RETURNED = "output"  # the operation that reads an output


def add_output_nodes(graph: Graph) -> Graph:
    """Give an output a node that reads it, where other nodes read it too or where it depends on parameters alone."""
    nodes, outputs = dict(graph.nodes), []
    for name in graph.outputs:
        node = nodes[name]
        if graph.users[name] or not graph.depends[name][1]:
            node = Node(f"{name}_returned", RETURNED, itself, (Ref(name),), {}, node.shape, node.dtype, node.origin)
            nodes[node.name] = node
        outputs.append(node.name)
    return dataclasses.replace(graph, nodes=nodes, outputs=tuple(outputs))


def itself(value: Value) -> Value:
    return value
