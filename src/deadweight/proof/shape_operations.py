"""Shape operations run on stand-ins: labels, coordinates and factors travel as the elements do."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Graph, Node, Value, references, substitute
from deadweight.proof.operation_groups import SHAPE_OF_ANOTHER
from deadweight.proof.steps import Blocked, refuse_large


def move(graph: Graph, node: Node, stand_in: Callable[[str], Tensor]) -> Value:
    """The result of a shape operation on what stands for its operands' elements.

    A tensor that says where elements go (how often each is repeated, say) must be a constant: data that decides it
    blocks, and so does an operation that does not run on stand-ins.
    """
    assert node.target is not None
    carried = {ref.name for ref in references(node.args[0])}

    def lookup(name: str) -> Tensor:
        return stand_in(name) if name in carried or node.op in SHAPE_OF_ANOTHER else known(graph, node, name)

    if node.op == "aten.reshape" and len(carried) == 1:
        return reshaped(node, stand_in(next(iter(carried))))
    try:
        result = node.target(*substitute(node.args, lookup), **substitute(node.kwargs, lookup))
    except (RuntimeError, TypeError) as error:
        raise Blocked(node.name, node.op, "its elements cannot be followed one by one") from error
    if isinstance(result, Tensor) and tuple(result.shape) != node.shape:
        raise Blocked(node.name, node.op, "its elements cannot be followed one by one")
    return result


def reshaped(node: Node, value: Tensor) -> Tensor:
    """The same elements in another shape; repeated ones stay repeated where the new shape allows it."""
    try:
        return value.view(node.shape)
    except RuntimeError:
        refuse_large(node)
        return value.reshape(node.shape)


def known(graph: Graph, node: Node, name: str) -> Tensor:
    value = constant_value(graph, name)
    if value is None:
        raise Blocked(node.name, node.op, "data decides where its elements go")
    return value
