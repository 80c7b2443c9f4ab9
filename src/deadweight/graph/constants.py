"""Values that depend on neither parameters nor inputs: positions, masks, indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deadweight.graph.bind import tables_indexed
from deadweight.graph.node import Graph, Node, Ref, float64_arguments, substitute


def constant_value(graph: Graph, name: str, stretch: int | None = None) -> Tensor | None:
    """The node's value if it depends on neither inputs nor parameters and can be computed without the model.

    With `stretch`, its value for that many positions instead of the traced number: every arange grows. None where
    there is no arange, or where the graph's shapes do not allow it.
    """
    if graph.depends[name] != (False, False):
        return None
    try:
        value, stretched = _compute(graph, name, stretch)
    except (RuntimeError, _Unknown):
        return None
    return None if stretch is not None and not stretched else value


def is_zero(graph: Graph, name: str) -> bool:
    """Whether every element of a constant is 0."""
    value = constant_value(graph, name)
    return value is not None and not bool(value.any())


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
    operands = {n: _compute(graph, n, stretch) for n in dict.fromkeys(node.inputs)}
    args, grown = node.args, any(s for _, s in operands.values())
    if node.op == "aten.arange" and stretch is not None and len(args) == 1 and args[0] > 1:
        args, grown = (max(stretch, args[0]),), True
    lookup = lambda n: operands[n][0]  # noqa: E731
    result = node.target(
        *float64_arguments(substitute(args, lookup)), **float64_arguments(substitute(node.kwargs, lookup))
    )
    if not isinstance(result, torch.Tensor) or result.is_meta:
        raise _Unknown
    return result, grown


def lower_bound(graph: Graph, name: str) -> int | None:
    """A lower bound of the elements of an integer value; None where the operations give none.

    An input that is used as an index of a table is at least 0: token ids are, distances need not be.
    """
    node, value = graph.nodes[name], constant_value(graph, name)
    if value is not None and value.numel():
        return int(value.min())
    if node.dtype == torch.bool:
        return 0
    if node.op == "input":
        return 0 if next(tables_indexed(graph, name), None) is not None else None
    if node.op not in BOUNDS or node.kwargs.get("alpha", 1) != 1:
        return None
    if node.op == "aten.sub" and isinstance(node.args[1], Ref):
        return None  # there is no upper bound for what is subtracted
    below = [lower_bound(graph, a.name) if isinstance(a, Ref) else a for a in node.args[:2]]
    return BOUNDS[node.op](*below) if all(isinstance(b, int) for b in below[: OPERANDS.get(node.op, 1)]) else None


SAME_NUMBERS = {"aten.to", "aten._to_copy", "aten.type_as", "aten.clone"}
SAME_NUMBERS |= {"aten.reshape", "aten.expand", "aten.unsqueeze", "aten.slice", "aten.select"}
BOUNDS: dict[str, Callable[..., int | None]] = {
    "aten.add": lambda a, b: a + b,
    "aten.sub": lambda a, b: a - b,
    "aten.mul": lambda a, b: a * b if min(a, b) >= 0 else None,
    "aten.cumsum": lambda a, *_: a if a >= 0 else None,
    **dict.fromkeys(SAME_NUMBERS, lambda a, *_: a),
}
OPERANDS = {"aten.add": 2, "aten.sub": 2, "aten.mul": 2}


def known_indices(graph: Graph, node: Node) -> list[Tensor | None] | None:
    """The index tensors of an aten.index, if all of them are constants."""
    if node.op != "aten.index":
        return None
    indices = [None if ref is None else constant_value(graph, ref.name) for ref in node.args[1]]
    known = all(value is not None or ref is None for value, ref in zip(indices, node.args[1], strict=True))
    return indices if known else None
