"""Values that depend on neither parameters nor inputs: positions, masks, indices."""

from __future__ import annotations

import torch
from torch import Tensor

from deadweight.graph.evaluate import float64_arguments
from deadweight.graph.node import Graph, Node, substitute


def constant_value(graph: Graph, name: str) -> Tensor | None:
    """The node's value if it is the same for every input and all parameters, and can be computed without the model."""
    node = graph.nodes[name]
    if graph.depends[name] != (False, False):
        return None
    if node.op == "buffer":
        value = graph.tensors[name]
        return None if value.is_meta else value.detach().cpu()
    inputs = {n: constant_value(graph, n) for n in set(node.inputs)}
    if node.target is None or any(v is None for v in inputs.values()):
        return None
    result = node.target(
        *float64_arguments(substitute(node.args, inputs.__getitem__)),
        **float64_arguments(substitute(node.kwargs, inputs.__getitem__)),
    )
    return result if isinstance(result, torch.Tensor) and not result.is_meta else None


def known_indices(graph: Graph, node: Node) -> list[Tensor | None] | None:
    """The index tensors of an aten.index, if all of them are constants."""
    if node.op != "aten.index":
        return None
    found = [None if ref is None else constant_value(graph, ref.name) for ref in node.args[1]]
    known = all(value is not None or ref is None for value, ref in zip(found, node.args[1], strict=True))
    return found if known else None
