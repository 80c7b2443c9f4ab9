"""The canonical form of a Graph: affine parts split off, casts and copies removed, norms recognised.

The rules of the laws only see `linear`, `add` and `mul` where a model may have written addmm, layer_norm, Conv1D,
batch_norm or its own RMSNorm. The function stays the same: each new node carries the code that computes it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from deadweight.graph import complex_products as _complex_products  # noqa: F401  (each registers its rewrites)
from deadweight.graph import convolutions as _convolutions  # noqa: F401
from deadweight.graph import embedding_bag as _embedding_bag  # noqa: F401
from deadweight.graph import empty_operands as _empty_operands  # noqa: F401
from deadweight.graph import recurrent as _recurrent  # noqa: F401
from deadweight.graph import slice_writes as _slice_writes  # noqa: F401
from deadweight.graph import whole_masks as _whole_masks  # noqa: F401
from deadweight.graph.experts import every_expert
from deadweight.graph.filled import is_zeros
from deadweight.graph.matrix_forms import bias_before_views, in_matrix_form
from deadweight.graph.node import Argument, Graph, Node, Operation, Ref
from deadweight.graph.norm_cores import CORES
from deadweight.graph.operations import (
    DIV,
    LEAKY_RELU,
    LINEAR,
    MATMUL,
    MUL,
    PERMUTE,
    RELU,
    RESHAPE,
    SAFE_SOFTMAX,
    SOFTMAX,
    SUB,
    TRANSPOSE,
    VECTOR_NORM,
    VIEWS,
    ZEROS,
)
from deadweight.graph.outputs import RETURNED
from deadweight.graph.pieces import in_pieces
from deadweight.graph.rewriting import Canonicaliser, argument, arguments_as, rewrites
from deadweight.graph.spelled_out_norms import (
    centred_pattern,
    image_pattern,
    rms_pattern,
    softmax_pattern,
    unit_pattern,
)
from deadweight.graph.stacked_heads import heads_at_once
from deadweight.graph.views import permute

PROBABILITIES = "output_probabilities"


def canonical(graph: Graph, *, pieces: bool = True) -> Graph:
    """The same function in canonical form, without the nodes that reach no output.

    With `pieces`, a parameter that is only read in disjoint slices becomes one parameter per slice, and one of more
    axes that is only read as a matrix becomes that matrix.
    """
    if not pieces:
        return Canonicaliser(graph).run()
    return in_matrix_form(Canonicaliser(in_pieces(graph)).run())


def read_as_probabilities(graph: Graph) -> Graph:
    """The same graph with a softmax over the last axis of its first output."""
    first = graph.nodes[graph.outputs[0]]
    first = graph.node(first.args[0]) if first.op == RETURNED else first
    args = (Ref(first.name), -1)
    node = Node(PROBABILITIES, SOFTMAX.name, SOFTMAX.target, args, {}, first.shape, first.dtype)
    nodes = {**graph.nodes, node.name: node}
    return dataclasses.replace(graph, nodes=nodes, outputs=(node.name, *graph.outputs[1:]))


COPIES = ("clone", "alias", "contiguous", "detach", "lift_fresh_copy", "lift_fresh", "_to_copy", "to", "type_as")


@rewrites(*(f"aten.{name}" for name in COPIES), "aten.dropout", "aten.feature_dropout", "aten.native_dropout")
def drop_copy(make: Canonicaliser, node: Node) -> Ref | None:
    """A copy, a cast between float types, or dropout that is off, is the value itself."""
    source = node.args[0]
    if "dropout" in node.op and argument(node, 2, "train") and argument(node, 1, "p"):
        return None
    before, after = make.nodes[source.name].dtype, node.dtype
    same = before == after or (before is not None and after is not None and before.is_floating_point == node.is_float)
    keeps = before is not None and (before.is_floating_point or before == after) and node.op != "aten.native_dropout"
    return source if same and keeps and make.shape(source) == node.shape else None


@rewrites("aten.copy")
def drop_overwriting_copy(make: Canonicaliser, node: Node) -> Ref | None:
    """A copy over a whole tensor: the result is the source."""
    source = node.args[1]
    before = make.nodes[source.name]
    same = before.dtype == node.dtype or (before.is_float and node.is_float)  # other casts change numbers
    return source if same and before.shape == node.shape else None


@rewrites("aten.linear")
def split_linear(make: Canonicaliser, node: Node) -> Ref:
    """x·Wᵀ, then the bias."""
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    product = make.emit(f"{node.name}_product", LINEAR, (x, weight), node.shape, node)
    return make.affine(node, product, None, bias)


@rewrites("aten.addmm", "aten.baddbmm")
def split_addmm(make: Canonicaliser, node: Node) -> Ref | None:
    """β·bias + α·x·W, each factor its own node unless it is 1."""
    bias, x, weight = node.args[:3]
    product = make.emit(f"{node.name}_product", MATMUL, (x, weight), node.shape, node)
    product = matmul_with_parameter(make, make.nodes[product.name]) or product
    product = multiply(make, node, product, node.kwargs.get("alpha", 1), "alpha")
    bias = multiply(make, node, bias, node.kwargs.get("beta", 1), "beta")
    return make.affine(node, product, None, bias)


def multiply(make: Canonicaliser, node: Node, ref: Ref, factor: float, name: str) -> Ref:
    if factor == 1:
        return ref
    return make.emit(f"{node.name}_{name}", MUL, (ref, factor), make.shape(ref), node)


@rewrites("aten.mm", "aten.matmul", "aten.bmm")
def matmul_with_parameter(make: Canonicaliser, node: Node) -> Ref | None:
    """x·W is a linear map if W is a view of one parameter; any other product stays a matmul."""
    left, right = node.args[0], node.args[1]
    if is_parameter_view(make, right) and len(make.shape(right)) == 2:
        before = make.nodes[right.name]
        if before.op in ("aten.t", "aten.transpose", "aten.permute") and len(make.shape(before.args[0])) == 2:
            args = (left, before.args[0])  # the two transpositions cancel
            return make.emit(f"{node.name}_linear", LINEAR, args, node.shape, node)
        turned = make.emit(f"{node.name}_weight", TRANSPOSE, (right,), make.shape(right)[::-1], node)
        return make.emit(f"{node.name}_linear", LINEAR, (left, turned), node.shape, node)
    if is_parameter_view(make, left) and len(make.shape(left)) == 2 and len(make.shape(right)) > 1:
        return matrix_first(make, node)
    result = every_expert(make, node) if len(make.shape(right)) == 3 else None
    result = result or heads_at_once(make, node)
    if result is not None or node.op == "aten.matmul":
        return result
    return make.emit(f"{node.name}_matmul", MATMUL, (left, right), node.shape, node)


def matrix_first(make: Canonicaliser, node: Node) -> Ref:
    """W·x = (xᵀ·Wᵀ)ᵀ: a linear map of the columns of x."""
    weight, x = node.args[:2]
    rank = len(node.shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    columns = [make.shape(x)[a] for a in order]
    turned = make.emit(f"{node.name}_columns", PERMUTE, (x, order), tuple(columns), node)
    turned = permute(make, make.nodes[turned.name]) or turned
    images = (*columns[:-1], node.shape[-2])
    product = make.emit(f"{node.name}_linear", LINEAR, (turned, weight), images, node)
    return make.emit(f"{node.name}_rows", PERMUTE, (product, order), node.shape, node)


def is_parameter_view(make: Canonicaliser, ref: Argument) -> bool:
    """Whether a value is a parameter, or a view of one through shape operations only."""
    while isinstance(ref, Ref):
        node = make.nodes[ref.name]
        if node.op == "parameter":
            return True
        if node.op not in VIEWS:
            return False
        ref = node.args[0]
    return False


def core(make: Canonicaliser, node: Node, op: str, *args: Argument) -> Ref:
    return make.emit(f"{node.name}_core", Operation(op, CORES[op]), args, node.shape, node)


@rewrites("aten.layer_norm", "aten.native_layer_norm")
def split_layer_norm(make: Canonicaliser, node: Node) -> Ref | None:
    if node.op == "aten.native_layer_norm":
        return None
    x, axes, eps = node.args[0], node.args[1], argument(node, 4, "eps", 1e-5)
    normed = core(make, node, "core.layer", x, len(axes), eps)
    return make.affine(node, normed, argument(node, 2, "weight"), argument(node, 3, "bias"))


@rewrites("aten.rms_norm")
def split_rms_norm(make: Canonicaliser, node: Node) -> Ref:
    eps = argument(node, 3, "eps")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    normed = core(make, node, "core.rms", node.args[0], len(node.args[1]), eps)
    return make.affine(node, normed, argument(node, 2, "weight"), None)


@rewrites("aten.mul", "aten.div")
def recognise_rms(make: Canonicaliser, node: Node) -> Ref | None:
    """x · 1; x · rsqrt(mean(x²) + ε) of x, x − mean(x) or a linear image of x; x / max(‖x‖, ε); a softmax."""
    if node.kwargs:
        return None
    first = make.nodes[node.args[0].name] if isinstance(node.args[0], Ref) else None
    if first is not None and node.args[1] == 1 and (first.shape, first.dtype) == (node.shape, node.dtype):
        return Ref(first.name)
    if node.op == "aten.mul" and any(is_zeros(make, a) for a in node.args):
        return make.emit(f"{node.name}_zeros", ZEROS, (list(node.shape),), node.shape, node)
    if by_hand := softmax_pattern(make.nodes, node):
        args = (Ref(by_hand[0]), by_hand[1])
        return make.emit(f"{node.name}_softmax", SOFTMAX, args, node.shape, node)
    if (found := rms_pattern(make.nodes, node)) is not None:
        x, eps = found
        if (whole := centred_pattern(make.nodes, x)) is not None:
            return core(make, node, "core.layer", Ref(whole), 1, eps)
        return core(make, node, "core.rms", Ref(x), 1, eps)
    if (image := image_pattern(make.nodes, node)) is not None:
        source, weight, epsilon = image
        core_rms = Operation("core.rms", CORES["core.rms"])
        normed = make.emit(f"{node.name}_core", core_rms, (Ref(source), 1, epsilon), make.nodes[source].shape, node)
        return make.emit(f"{node.name}_image", LINEAR, (normed, weight), node.shape, node)
    if (unit := unit_pattern(make.nodes, node)) is not None:
        x, eps = unit
        return core(make, node, "core.unit", Ref(x), 1, 1.0, eps)
    return fold_scale_into_unit(make, node)


@rewrites("aten.clamp", "aten.clamp_min")
def clamp_at_zero(make: Canonicaliser, node: Node) -> Ref | None:
    """max(x, 0) is ReLU(x); of a norm, which is never negative, it stays what it is."""
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if make.nodes[node.args[0].name].op == VECTOR_NORM.name:
        return None
    if isinstance(low, Ref) or low is None or low != 0 or high is not None or not node.is_float:
        return None
    return make.emit(f"{node.name}_relu", RELU, (node.args[0],), node.shape, node)


@rewrites("aten.rrelu")
def slope_of_rrelu(make: Canonicaliser, node: Node) -> Ref | None:
    """In eval the slope of a randomised leaky ReLU is the middle of its range."""
    low, high = argument(node, 1, "lower", 1 / 8), argument(node, 2, "upper", 1 / 3)
    if argument(node, 3, "training", False):
        return None
    return make.emit(f"{node.name}_leaky", LEAKY_RELU, (node.args[0], (low + high) / 2), node.shape, node)


@rewrites("aten.add")
def plain_addition(make: Canonicaliser, node: Node) -> Ref | None:
    """x + 0 is x; a bias of many axes is added as a vector."""
    return add_zeros(make, node) or bias_before_views(make, node)


def add_zeros(make: Canonicaliser, node: Node) -> Ref | None:
    """x + 0 is x."""
    for x, other in (node.args, node.args[::-1]):
        plain = isinstance(x, Ref) and is_zeros(make, other) and not node.kwargs
        if plain and make.shape(x) == node.shape and make.nodes[x.name].dtype == node.dtype:
            return x
    return None


def fold_scale_into_unit(make: Canonicaliser, node: Node) -> Ref | None:
    """A number times a vector of length one is a vector of that length."""
    x, number = node.args[:2]
    before = make.nodes[x.name] if isinstance(x, Ref) else None
    if before is None or before.op != "core.unit" or isinstance(number, (Ref, bool)) or not math.isfinite(number):
        return None
    x, axes, scale, eps = before.args
    factor = 1 / number if node.op == "aten.div" else number
    return core(make, node, "core.unit", x, axes, scale * factor, eps)


@rewrites("aten._weight_norm")
def split_weight_norm(make: Canonicaliser, node: Node) -> Ref:
    """g·v/‖v‖, the norm over every axis but one (or over all), each step its own node."""
    v, g, dim = node.args[0], node.args[1], argument(node, 2, "dim", 0)
    axes = [a for a in range(len(node.shape)) if dim == -1 or a != dim % len(node.shape)]
    lengths = tuple(1 if a in axes else n for a, n in enumerate(node.shape))
    norm = make.emit(f"{node.name}_norm", VECTOR_NORM, (v, 2, axes, True), lengths, node)
    unit = make.emit(f"{node.name}_unit", DIV, (v, norm), node.shape, node)
    return make.emit(f"{node.name}_scaled", MUL, (unit, g), node.shape, node)


@dataclass(frozen=True)
class BatchNorm:
    """What a batch norm is given, by the names of its schema."""

    input: Ref
    weight: Ref | None
    bias: Ref | None
    eps: float
    running_mean: Ref | None = None
    running_var: Ref | None = None
    training: bool = False


@rewrites("aten.batch_norm")
def split_batch_norm(make: Canonicaliser, node: Node) -> Ref:
    """Batch statistics: a core. Running statistics: (x − μ)/σ with constants."""
    return batch_norm(make, node, arguments_as(BatchNorm, node))


def batch_norm(make: Canonicaliser, node: Node, norm: BatchNorm) -> Ref:
    view = [1, node.shape[1]] + [1] * (len(node.shape) - 2)
    if norm.training or norm.running_mean is None:
        normed = core(make, node, "core.batch", norm.input, norm.eps)
        return make.affine(node, normed, norm.weight, norm.bias, view)
    scale = make.emit(f"{node.name}_scale", RUNNING_SCALE, (norm.running_var, norm.eps, view), tuple(view), node)
    centre = make.emit(f"{node.name}_centre", RESHAPE, (norm.running_mean, view), tuple(view), node)
    moved = make.emit(f"{node.name}_moved", SUB, (norm.input, centre), node.shape, node)
    normed = make.emit(f"{node.name}_normed", MUL, (moved, scale), node.shape, node)
    return make.affine(node, normed, norm.weight, norm.bias, view)


def running_scale(var: torch.Tensor, eps: float, view: list[int]) -> torch.Tensor:
    return (var + eps).rsqrt().view(view)


RUNNING_SCALE = Operation("running_scale", running_scale)


@rewrites("getitem")
def native_batch_norm(make: Canonicaliser, node: Node) -> Ref | None:
    """The first result of a batch norm in a lowered graph is the normalised value; the others are its statistics."""
    source = make.nodes[node.args[0].name]
    if node.args[1] != 0 or source.op not in NATIVE_BATCH_NORMS:
        return None
    return batch_norm(make, node, arguments_as(BatchNorm, source))


NATIVE_BATCH_NORMS = {
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_no_training",
    "aten.native_batch_norm",
}


@rewrites("aten.instance_norm")
def split_instance_norm(make: Canonicaliser, node: Node) -> Ref:
    """Statistics of each image: a core. Running statistics: as of a batch norm."""
    x, weight, bias, use_input_stats, eps = node.args[0], node.args[1], node.args[2], node.args[5], node.args[7]
    if not use_input_stats:
        return batch_norm(make, node, BatchNorm(x, weight, bias, eps, *node.args[3:5]))
    view = [1, node.shape[1]] + [1] * (len(node.shape) - 2)
    return make.affine(node, core(make, node, "core.instance", x, eps), weight, bias, view)


@rewrites("aten.group_norm")
def split_group_norm(make: Canonicaliser, node: Node) -> Ref:
    x, groups = node.args[0], node.args[1]
    view = [1, node.shape[1]] + [1] * (len(node.shape) - 2)
    normed = core(make, node, "core.group", x, groups, argument(node, 4, "eps", 1e-5))
    return make.affine(node, normed, argument(node, 2, "weight"), argument(node, 3, "bias"), view)


@rewrites("aten.embedding")
def plain_embedding(make: Canonicaliser, node: Node) -> Ref | None:
    """A look-up without its options: which rows get no gradient, or a smaller one, is no part of the function."""
    if len(node.args) == 2 and not node.kwargs:
        return None
    return make.emit(f"{node.name}_rows", node.operation, node.args[:2], node.shape, node)


@rewrites("aten._softmax", "aten.softmax", "aten.special_softmax", "aten._safe_softmax")
def plain_softmax(make: Canonicaliser, node: Node) -> Ref:
    args = (node.args[0], node.args[1])
    operation = SAFE_SOFTMAX if node.op == "aten._safe_softmax" else SOFTMAX
    return make.emit(f"{node.name}_softmax", operation, args, node.shape, node)
