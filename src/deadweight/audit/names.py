"""Names of the graph in words for people."""

from __future__ import annotations

import re

from deadweight.graph.node import Graph


def place_of(graph: Graph, node: str) -> str:
    """What a step is about, for people: a parameter by its name, an operation by its module and its line of code."""
    origin = graph.nodes[node].origin if node in graph.nodes else None
    return graph.parameters.get(node) or (str(origin) if origin is not None else node)


def by_name(graph: Graph, words: str) -> str:
    """The same text with the state-dict names of parameters."""
    for name in sorted(set(re.findall(r"\bp_\w+", words)), key=len, reverse=True):
        words = re.sub(rf"\b{re.escape(name)}\b", graph.parameters.get(name, name), words)
    return words
