"""Operations in place on values of their own, made into operations that return a new value.

torch lowers a program that writes to tensors by tracing it again, which takes as long as the first time. The usual
case needs none of that: `relu_` on the result of a norm or a convolution, of which nobody holds a view.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They return new memory, never their operand or a view of it; dropout, reshape and contiguous may.
FRESH = words("""
_softmax add addmm avg_pool2d batch_norm bmm cat conv1d conv2d conv3d convolution div elu exp gelu group_norm
hardsigmoid hardswish hardtanh instance_norm layer_norm leaky_relu linear matmul max_pool2d mean mm mul neg relu relu6
rsqrt sigmoid silu softmax sqrt sub sum tanh
""")


def without_writing(graph: fx.Graph) -> None:
    """Replace every operation in place of which that is known to be the same function; leave the others."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = functional_of(node)
        if functional is None:
            continue
        written = node.args[0]
        if not isinstance(written, fx.Node) or not owned(written, node, place):
            continue
        node.target = functional
        for user in list(written.users):
            if place[user] > place[node]:
                user.replace_input_with(written, node)


def functional_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operation that returns what this one writes to its first operand."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name, overload = node.target._schema.name, node.target._overloadname
    if not node.target._schema.is_mutable or not name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removeprefix("aten::")[:-1], None)
    found = getattr(packet, overload, None) if packet is not None and name[6:-1] in FRESH else None
    return found if found is not None and same_type(node) else None


def same_type(node: fx.Node) -> bool:
    """Whether no operand would make the result wider than what is written to."""
    values = [a.meta.get("val") for a in node.all_input_nodes]
    found = node.meta.get("val")
    return isinstance(found, Tensor) and all(
        isinstance(v, Tensor) and v.dtype == found.dtype and len(v.shape) <= len(found.shape) for v in values
    )


def owned(written: fx.Node, node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Whether a value is new memory of which nothing that was computed before can be a view."""
    before = [user for user in written.users if place[user] < place[node]]
    return is_fresh(written) and all(is_fresh(user) for user in before)


def is_fresh(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.removeprefix("aten::")
    return name in FRESH and not node.target._schema.is_mutable
