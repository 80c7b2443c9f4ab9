"""Shape operations on stand-ins: what cannot be followed element by element blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.shape_operations import move
from deadweight.proof.steps import Blocked


def fails(_: Tensor) -> Tensor:
    raise RuntimeError("not for whole numbers")


@pytest.mark.parametrize("target", [fails, lambda x: x[:1], lambda x: x.repeat(2)])
def test_an_operation_that_does_otherwise_on_stand_ins_blocks(target: Callable) -> None:
    node = Node("moved", "aten.flip", target, (Ref("x"),), {}, (3,), torch.float64)
    graph = Graph({"x": Node("x", "input", shape=(3,)), "moved": node}, {}, ("moved",))
    with pytest.raises(Blocked, match="one by one"):
        move(graph, node, lambda _: torch.arange(3))
