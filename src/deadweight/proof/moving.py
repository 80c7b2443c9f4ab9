"""Shape operations run on stand-ins: labels, coordinates and factors travel as the elements do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from deadweight.graph.constants import constant_value
from deadweight.graph.node import Graph, Node, references, substitute
from deadweight.proof.opsets import SHAPE_OF_ANOTHER
from deadweight.proof.steps import Blocked


def move(graph: Graph, node: Node, stand_in: Callable[[str], Tensor]) -> Any:
    """The result of a shape operation on what stands for its operands' elements.

    A tensor that says where elements go (how often each is repeated, say) must be a constant: data that decides it
    blocks, and so does an operation that does not run on stand-ins.
    """
    assert node.target is not None
    carried = {ref.name for ref in references(node.args[0])}

    def lookup(name: str) -> Tensor:
        return stand_in(name) if name in carried or node.op in SHAPE_OF_ANOTHER else known(graph, node, name)

    try:
        result = node.target(*substitute(node.args, lookup), **substitute(node.kwargs, lookup))
    except (RuntimeError, TypeError) as error:
        raise Blocked(node.name, node.op, "its elements cannot be followed one by one") from error
    if isinstance(result, Tensor) and tuple(result.shape) != node.shape:
        raise Blocked(node.name, node.op, "its elements cannot be followed one by one")
    return result


def known(graph: Graph, node: Node, name: str) -> Tensor:
    value = constant_value(graph, name)
    if value is None:
        raise Blocked(node.name, node.op, "data decides where its elements go")
    return value
