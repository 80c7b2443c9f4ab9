"""The part of the graph that a proof walks: which step reads the value of which, and which parameters it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deadweight.audit.names import by_name, place_of
from deadweight.audit.result import Visit
from deadweight.graph.node import Graph
from deadweight.proof.operation_groups import SHAPE
from deadweight.proof.steps import Step


def walk_graph(graph: Graph, steps: Sequence[Step]) -> tuple[Visit, ...]:
    """Every step but those that only move elements, with the earlier steps and the parameters that it reads."""
    visits: list[Visit] = []
    last: dict[str, int] = {}  # node to the latest step there
    for step in steps:
        if step.op in SHAPE:
            continue
        sources = [step.node] if step.node in last else list(sources_of(graph, step.node, last))
        visits.append(
            Visit(
                node=place_of(graph, step.node),
                op=step.op,
                rule=by_name(graph, step.rule),
                conclusion=by_name(graph, step.conclusion),
                reads=tuple(sorted({last[name] for name in sources if name in last})),
                parameters=tuple(dict.fromkeys(graph.parameters[n] for n in sources if n in graph.parameters)),
            )
        )
        last[step.node] = len(visits) - 1
    return tuple(visits)


def sources_of(graph: Graph, name: str, visited: dict[str, int]) -> Iterator[str]:
    """The steps and parameters that a node reads, directly or behind operations that only move elements."""
    stack, seen = list(graph.nodes[name].inputs) if name in graph.nodes else [], set[str]()
    while stack:
        source = stack.pop(0)
        if source in seen:
            continue
        seen.add(source)
        if source in visited or source in graph.parameters:
            yield source
        elif graph.nodes[source].op in SHAPE:
            stack += graph.nodes[source].inputs
