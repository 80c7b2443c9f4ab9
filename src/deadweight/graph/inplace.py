"""In-place operations replaced by functional ones, where no view can see the difference.

torch lowers a program with in-place operations by tracing it again, which takes as long as the first trace. The usual
case does not need that: `relu_` on the result of a norm or a convolution, of which there is no view.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from deadweight.source.private_api import OpOverload, base_name, schema


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They return new memory, never their operand or a view of it, as dropout, reshape and contiguous may.
FRESH = words("""
_assert_tensor_metadata _softmax add addmm avg_pool2d batch_norm bmm cat conv1d conv2d conv3d convolution div elu exp
gelu group_norm hardsigmoid hardswish hardtanh instance_norm layer_norm leaky_relu linear masked_fill matmul max_pool2d
mean mm mul neg relu relu6 rsqrt sigmoid silu softmax sqrt sub sum tanh tril triu
""")


# They allocate a tensor.
MADE = words("""
empty empty_like full full_like lift_fresh_copy new_empty new_full new_ones new_zeros ones ones_like zeros zeros_like
""")
SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
Places = dict[fx.Node, float]


def without_writing(graph: fx.Graph) -> None:
    """Replace every in-place operation whose functional form is known to compute the same; leave the others."""
    place: Places = {node: float(number) for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = functional_of(node)
        written = node.args[0] if functional is not None else None
        if not isinstance(written, fx.Node):
            continue
        views = slices_of(written)
        base = views[-1].args[0] if views else written
        if not isinstance(base, fx.Node) or not is_owned(base, node, place, views):
            continue
        assert functional is not None
        node.target = functional
        after = put_back(graph, node, views, place)
        for user in list(base.users):
            if place[user] > place[node] and user is not after:
                user.replace_input_with(base, after)


def slices_of(written: fx.Node) -> list[fx.Node]:
    """The chain of slices through which a tensor is written to, the innermost first; each has one reader."""
    result = []
    while written.op == "call_function" and written.target in SCATTERS and len(written.users) == 1:
        result.append(written)
        written = written.args[0]  # type: ignore[assignment]
    return result


def put_back(graph: fx.Graph, node: fx.Node, views: list[fx.Node], place: Places) -> fx.Node:
    """The whole tensor with the new values in its slice."""
    inner = node
    for number, view in enumerate(views, 1):
        whole = view.args[0]
        assert isinstance(whole, fx.Node)
        with graph.inserting_after(inner):
            scatter = SCATTERS[view.target]  # type: ignore[index]
            outer = graph.call_function(scatter, (whole, inner, *view.args[1:]), dict(view.kwargs))
        outer.meta = dict(whole.meta)
        place[outer] = place[node] + number / (len(views) + 1)
        inner = outer
    return inner


def functional_of(node: fx.Node) -> OpOverload | None:
    """The functional form of an in-place operation; None if it is none, or not a known one."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name, overload = schema(node.target).name, schema(node.target).overload_name
    if not schema(node.target).is_mutable or not name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removeprefix("aten::")[:-1], None)
    known = FRESH | {"fill", "copy", "detach"}
    functional = getattr(packet, overload, None) if packet is not None and name[6:-1] in known else None
    return functional if functional is not None and same_type(node) else None


def same_type(node: fx.Node) -> bool:
    """Whether all operands have the dtype and at most the rank of the tensor written to; a mask has its own dtype."""
    masked = node.target in (torch.ops.aten.masked_fill_.Scalar, torch.ops.aten.masked_fill_.Tensor)
    values = [a.meta.get("val") for a in node.all_input_nodes if not (masked and a is node.args[1])]
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(
        isinstance(v, Tensor) and v.dtype == value.dtype and len(v.shape) <= len(value.shape) for v in values
    )


def is_owned(base: fx.Node, node: fx.Node, place: Places, views: list[fx.Node]) -> bool:
    """Whether a value is new memory, and no view of it but those given is read after this node."""
    before = [user for user in base.users if place[user] < place[node] and user not in views]
    return is_fresh(base, FRESH | MADE) and all(is_done_with(user, node, place) for user in before)


def is_done_with(user: fx.Node, node: fx.Node, place: Places) -> bool:
    """Whether a reader returned new memory, or slices that are all read before this node."""
    if user.op == "call_function" and user.target in SCATTERS:
        return all(place[u] < place[node] and is_done_with(u, node, place) for u in user.users)
    return is_fresh(user)


def is_fresh(node: fx.Node, ops: frozenset[str] = FRESH) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    name = base_name(node.target)
    if name == "to":
        return is_converted(node)
    return (name in ops and not schema(node.target).is_mutable) or node.target in SCATTERS.values()


def is_converted(node: fx.Node) -> bool:
    """`to` returns new memory where the dtype changes; otherwise it may return its operand."""
    before = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    after = node.meta.get("val")
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype
