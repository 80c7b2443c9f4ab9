"""Names of the graph in words for people."""

from __future__ import annotations

import re

from deadweight.graph.node import Graph


def by_name(graph: Graph, words: str, *nodes: str) -> str:
    """The same text with the state-dict names of parameters."""
    for name in sorted({*nodes, *re.findall(r"\bp_\w+", words)}, key=len, reverse=True):
        words = re.sub(rf"\b{re.escape(name)}\b", graph.parameters.get(name, name), words)
    return words
