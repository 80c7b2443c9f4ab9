"""Values that depend on neither parameters nor inputs: positions, masks, indices."""

from __future__ import annotations

import torch
from torch import Tensor

from deadweight.graph.evaluate import float64_arguments
from deadweight.graph.node import Graph, Node, substitute


def constant_value(graph: Graph, name: str, stretch: int | None = None) -> Tensor | None:
    """The node's value if it is the same for every input and all parameters, and can be computed without the model.

    With `stretch`, its value for that many positions instead of the traced number: every arange grows; None where
    nothing grows or the graph's shapes do not allow it.
    """
    if graph.depends[name] != (False, False):
        return None
    try:
        value, stretched = _compute(graph, name, stretch)
    except (RuntimeError, _Unknown):
        return None
    return None if stretch is not None and not stretched else value


class _Unknown(Exception):
    """A value that only the model itself holds."""


def _compute(graph: Graph, name: str, stretch: int | None) -> tuple[Tensor, bool]:
    node = graph.nodes[name]
    if node.op == "buffer":
        value = graph.tensors[name]
        if value.is_meta:
            raise _Unknown
        return value.detach().cpu(), False
    if node.target is None:
        raise _Unknown
    found = {n: _compute(graph, n, stretch) for n in dict.fromkeys(node.inputs)}
    args, grown = node.args, any(s for _, s in found.values())
    if node.op == "aten.arange" and stretch is not None and len(args) == 1 and args[0] > 1:
        args, grown = (max(stretch, args[0]),), True
    lookup = lambda n: found[n][0]  # noqa: E731
    result = node.target(
        *float64_arguments(substitute(args, lookup)), **float64_arguments(substitute(node.kwargs, lookup))
    )
    if not isinstance(result, torch.Tensor) or result.is_meta:
        raise _Unknown
    return result, grown


def lower_bound(graph: Graph, name: str) -> int:
    """A number that no element of an integer value is below: 0 unless the arithmetic says more."""
    node = graph.nodes[name]
    value = constant_value(graph, name)
    if value is not None and value.numel():
        return max(0, int(value.min()))
    if node.op == "aten.add" and isinstance(node.args[1], int):
        return lower_bound(graph, node.args[0].name) + max(0, node.args[1])
    if node.op in ("aten.to", "aten._to_copy", "aten.reshape", "aten.expand", "aten.unsqueeze", "aten.slice"):
        return lower_bound(graph, node.args[0].name)
    return 0


def known_indices(graph: Graph, node: Node) -> list[Tensor | None] | None:
    """The index tensors of an aten.index, if all of them are constants."""
    if node.op != "aten.index":
        return None
    found = [None if ref is None else constant_value(graph, ref.name) for ref in node.args[1]]
    known = all(value is not None or ref is None for value, ref in zip(found, node.args[1], strict=True))
    return found if known else None
