"""Convolutions: the bias as an addition of its own, and transposed ones in the general form."""

from __future__ import annotations

from deadweight.graph.node import Node, Ref
from deadweight.graph.operations import CONVOLUTION
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites


@rewrites("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
def split_convolution(make: Canonicaliser, node: Node) -> Ref | None:
    """The convolution, then its bias along the channel axis."""
    bias = argument(node, 2, "bias")
    if bias is None or len(node.shape) != len(make.shape(node.args[1])):
        return None  # without a batch axis, the channels are another axis
    args = (*node.args[:2], None, *node.args[3:])
    product = make.emit(f"{node.name}_product", node.operation, args, node.shape, node)
    view = [1, node.shape[1]] + [1] * (len(node.shape) - 2)
    return make.affine(node, product, None, bias, view)


@rewrites("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def general_transposed(make: Canonicaliser, node: Node) -> Ref | None:
    """The general convolution, told to be transposed; then its bias along the channel axis."""
    rank = len(node.shape) - 2
    if len(make.shape(node.args[1])) != rank + 2:
        return None  # without a batch axis, the channels are another axis
    names, defaults = ("stride", "padding", "output_padding", "groups", "dilation"), (1, 0, 0, 1, 1)
    given = {n: argument(node, 3 + i, n, d) for i, (n, d) in enumerate(zip(names, defaults, strict=True))}
    stride, padding, more, dilation = (
        list(v) * (rank // len(v)) if isinstance(v, (list, tuple)) else [v] * rank
        for v in (given[n] for n in ("stride", "padding", "output_padding", "dilation"))
    )
    args = (*node.args[:2], None, stride, padding, dilation, True, more, given["groups"])
    product = make.emit(f"{node.name}_product", CONVOLUTION, args, node.shape, node)
    bias = argument(node, 2, "bias")
    return make.affine(node, product, None, bias, [1, node.shape[1]] + [1] * rank)
