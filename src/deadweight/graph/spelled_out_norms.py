"""Norms and softmax that a model spells out, recognised by their arithmetic."""

from __future__ import annotations

from deadweight.graph.node import Argument, Node, Ref

Nodes = dict[str, Node]


def rms_pattern(nodes: Nodes, node: Node) -> tuple[str, float] | None:
    """(x, ε) if the node is x · (mean(x²) + ε)^(−1/2) over the last axis, however it is written."""
    if len(node.args) != 2 or not all(isinstance(a, Ref) for a in node.args):
        return None
    left, right = (a.name for a in node.args)
    pairs = [(left, right)] if node.op == "aten.div" else [(left, right), (right, left)]
    for x, factor in pairs:
        shifted = under_root(nodes, factor, inverse=node.op == "aten.mul")
        eps = mean_square(nodes, shifted, x) if shifted is not None else None
        if eps is not None:
            return x, eps
    return None


def image_pattern(nodes: Nodes, node: Node) -> tuple[str, Ref, float] | None:
    """(x, W, ε) if the node is W·x times (mean(x²) + ε)^(−1/2): the linear map of a norm, with the factor behind it."""
    if len(node.args) != 2 or not all(isinstance(a, Ref) for a in node.args):
        return None
    for image, factor in (node.args,) if node.op == "aten.div" else (node.args, node.args[::-1]):
        product = nodes[image.name]
        shifted = under_root(nodes, factor.name, inverse=node.op == "aten.mul") if product.op == "linear" else None
        eps = mean_square(nodes, shifted, source(product)) if shifted is not None else None
        if eps is not None and product.shape == node.shape:
            return source(product), product.args[1], eps
    return None


def centred_pattern(nodes: Nodes, name: str) -> str | None:
    """x if the node is x − mean(x) over the last axis."""
    node = nodes[name]
    if node.op != "aten.sub" or node.kwargs or not all(isinstance(a, Ref) for a in node.args):
        return None
    x, mean = node.args[0].name, nodes[node.args[1].name]
    return x if mean.op == "aten.mean" and source(mean) == x and over_last_axis(nodes, mean) else None


def same_value(nodes: Nodes, one: str, other: str) -> bool:
    """Whether two nodes are the same operation on the same operands: one value, computed twice."""
    a, b = nodes[one], nodes[other]
    return one == other or (a.target is not None and (a.op, a.args, a.kwargs) == (b.op, b.args, b.kwargs) and is_sum(a))


def is_sum(node: Node) -> bool:
    """A sum or a difference: it draws no random numbers."""
    return node.op in ("aten.add", "aten.sub")


def unit_pattern(nodes: Nodes, node: Node) -> tuple[str, float] | None:
    """(x, ε) if the node is x / max(‖x‖, ε) over the last axis, as torch.nn.functional.normalize writes it."""
    if node.op != "aten.div" or node.kwargs or not all(isinstance(a, Ref) for a in node.args):
        return None
    x, below = node.args[0].name, nodes[node.args[1].name]
    below = nodes[source(below)] if below.op in ("aten.expand", "aten.expand_as") else below
    if below.op != "aten.clamp_min" or not isinstance(below.args[1], (int, float)):
        return None
    norm = nodes[source(below)]
    if norm.op != "aten.linalg_vector_norm" or source(norm) != x or not is_last_two_norm(nodes, norm):
        return None
    return x, float(below.args[1])


def softmax_pattern(nodes: Nodes, node: Node) -> tuple[str, int] | None:
    """(x, axis) if the node is exp(x) / Σ exp(x) along one axis, with or without max(x) subtracted first."""
    if node.op != "aten.div" or node.kwargs or not all(isinstance(a, Ref) for a in node.args):
        return None
    exponential, total = nodes[node.args[0].name], nodes[node.args[1].name]
    if exponential.op != "aten.exp" or total.op != "aten.sum" or source(total) != exponential.name:
        return None
    axis = kept_axis(nodes, total)
    if axis is None:
        return None
    x = nodes[source(exponential)]
    largest = nodes[x.args[1].name] if x.op == "aten.sub" and isinstance(x.args[1], Ref) and not x.kwargs else None
    if largest is not None and largest.op == "aten.amax" and source(largest) == source(x):
        return (source(x), axis) if kept_axis(nodes, largest) == axis else None
    return x.name, axis


def kept_axis(nodes: Nodes, node: Node) -> int | None:
    """The axis of a reduction over one axis with keepdim=True; None for any other."""
    rank = len(nodes[source(node)].shape)
    axes: Argument = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    axes = [axes] if isinstance(axes, int) else axes or []
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return axes[0] % rank if keep and len(axes) == 1 else None


def is_last_two_norm(nodes: Nodes, norm: Node) -> bool:
    """Whether this is the Euclidean norm over the last axis, with keepdim=True."""
    order, axes, keep = (*norm.args[1:], *[None] * 3)[:3]
    rank = len(nodes[source(norm)].shape)
    axes = norm.kwargs.get("dim", axes)
    plain = order in (2, 2.0, None) and axes is not None and not norm.kwargs.get("dtype")
    return plain and bool(norm.kwargs.get("keepdim", keep)) and [a % rank for a in axes] == [rank - 1]


def under_root(nodes: Nodes, name: str, *, inverse: bool) -> str | None:
    """The operand of a square root, or of an inverse square root."""
    node = nodes[name]
    if inverse and node.op == "aten.rsqrt":
        return source(node)
    if inverse and node.op in ("aten.reciprocal",):
        return under_root(nodes, node.args[0].name, inverse=False)
    if node.op == "aten.pow" and node.args[1] == (-0.5 if inverse else 0.5):
        return source(node)
    return source(node) if not inverse and node.op == "aten.sqrt" else None


def mean_square(nodes: Nodes, name: str, x: str) -> float | None:
    """ε if the node is mean(x²) + ε over the last axis."""
    node, eps = nodes[name], 0.0
    if node.op == "aten.add" and isinstance(node.args[1], (int, float)) and not node.kwargs:
        eps, node = float(node.args[1]), nodes[node.args[0].name]
    if node.op != "aten.mean" or not over_last_axis(nodes, node):
        return None
    return eps if is_square(nodes, nodes[node.args[0].name], x) else None


def over_last_axis(nodes: Nodes, node: Node) -> bool:
    rank = len(nodes[node.args[0].name].shape)
    axes: Argument = node.args[1] if len(node.args) > 1 else None
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return bool(keep) and axes is not None and [a % rank for a in axes] == [rank - 1]


def is_square(nodes: Nodes, node: Node, x: str) -> bool:
    if (node.op == "aten.pow" and node.args[1] == 2) or node.op == "aten.square":
        return bool(source(node)) and same_value(nodes, source(node), x)
    names = [str(getattr(a, "name", "")) for a in node.args]
    alike = node.op == "aten.mul" and len(names) == 2 and names[0] == names[1] != ""
    return alike and same_value(nodes, names[0], x)


def source(node: Node) -> str:
    ref = node.args[0]
    return ref.name if isinstance(ref, Ref) else ""
