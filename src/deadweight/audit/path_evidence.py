"""Evidence for a graph that was traced on values: parameters and inputs with which its path can be run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import as_float64, evaluate
from deadweight.graph.node import Graph, Node, Value
from deadweight.source.model import Source

Values = dict[str, Tensor]
Draw = Callable[[int], Values]


def on_path(graph: Graph, values: Values, draw: Draw, source: Source) -> tuple[Values, Draw]:
    """These parameters and inputs; where a specialised graph does not run on them, those that it was traced on."""
    if not graph.specialised:
        return values, draw
    example = bind(graph, source.inputs.args, source.inputs.kwargs)
    traced = {name: as_float64(tensor.detach()) for name, tensor in graph.tensors.items()}
    kept = values if runs(graph, values, example) else traced

    def drawn(seed: int) -> Values:
        inputs = draw(seed)
        return inputs if runs(graph, kept, inputs) else example

    return kept, drawn


def runs(graph: Graph, values: Values, inputs: Values) -> bool:
    """Whether the graph runs, and all values have the traced shapes: how many tokens an expert gets is fixed in it."""

    def keep(node: Node, value: Value) -> Value:
        if isinstance(value, Tensor) and tuple(value.shape) != node.shape:
            raise ValueError(f"{node.name} has another shape on this path")
        return value

    try:
        evaluate(graph, values, inputs, keep)
    except (RuntimeError, IndexError, ValueError):
        return False
    return True
