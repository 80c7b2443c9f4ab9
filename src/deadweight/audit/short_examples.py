"""Shorter examples: proofs for two short sequences hold for many long ones, if the model runs the same operations.

A model is traced on the example as given. Where batch or sequence are long, it is traced again on a short example. If
both traces are the same operations on the same values, and differ in sizes only, the short one is used. Values that
depend on sizes alone (positions, masks, buckets) must vary along the same axes too: 16 positions may fall into one
bucket where 32 do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.constants import constant_value
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph, Node, Ref
from deadweight.graph.trace import TraceError, trace
from deadweight.proof.operation_groups import INDEXED
from deadweight.source.inputs import Inputs
from deadweight.source.model import Source

LARGE = 1 << 18  # elements of a traced value: below this a shorter example saves no time
BATCH = 2
LENGTH = 16
SIDE = 64  # pixels


def shorten_example(source: Source, graph: Graph) -> tuple[Source, Graph]:
    """The model on a shorter example, and its graph, if the operations are the same; else as it was."""
    if source.config is not None or not source.has_weights or graph.specialised or largest_value(graph) < LARGE:
        return source, graph
    if not all(one_row_each(graph, node) for node in graph.nodes.values()):
        return source, graph
    for inputs in shorter_examples(source.inputs):
        device = next(source.module.parameters()).device
        args, kwargs = inputs.on(device)
        try:
            short = canonical(trace(source.module, args, kwargs))
        except (TraceError, DeadweightError):
            continue  # the model needs these sizes
        if same_program(graph, short) and same_constants(graph, short) and runs(short, inputs):
            return replace(source, inputs=inputs, args=args, kwargs=kwargs), short
    return source, graph


def runs(graph: Graph, inputs: Inputs) -> bool:
    """Whether the short example runs: an input may hold indices beyond the new length."""
    values = {name: tensor.detach() for name, tensor in graph.tensors.items()}
    try:
        with torch.no_grad():
            evaluate(graph, values, bind(graph, inputs.args, inputs.kwargs))
    except (IndexError, RuntimeError, ValueError):
        return False
    return True


def one_row_each(graph: Graph, node: Node) -> bool:
    """Whether a constant index into parameters reads every row at most once: buckets need all their positions."""
    if node.op not in INDEXED | {"aten.embedding"} or not graph.depends[node.inputs[0]][0]:
        return True
    indices = [constant_value(graph, name) for name in node.inputs[1:] if graph.depends[name] == (False, False)]
    return all(value is not None and len(value.unique()) == value.numel() for value in indices)


def same_constants(one: Graph, other: Graph) -> bool:
    """Whether every value that depends on sizes alone varies along the same axes in both graphs."""
    for name, depends in one.depends.items():
        if depends == (False, False) and math.prod(one.nodes[name].shape) > 1:
            values = constant_value(one, name), constant_value(other, name)
            if values[0] is None or values[1] is None or varying(values[0]) != varying(values[1]):
                return False
    return True


def varying(value: Tensor) -> list[bool]:
    return [not torch.equal(value, value.narrow(axis, 0, 1).expand_as(value)) for axis in range(value.ndim)]


def largest_value(graph: Graph) -> int:
    stored = ("parameter", "buffer")
    return max((math.prod(n.shape) for n in graph.nodes.values() if n.op not in stored), default=0)


def shorter_examples(inputs: Inputs) -> Iterator[Inputs]:
    """Batch, sequence and images cut, then without the images, then the batch alone, then the sequence alone."""
    tensors = [t for t in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, Tensor) and t.ndim > 1]
    batch = {t.shape[0] for t in tensors if t.shape[0] > BATCH}
    tokens = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
    length = {t.shape[1] for t in tokens if t.shape[1] > 2 * LENGTH}
    images = [t for t in tensors if t.is_floating_point() and t.ndim == 4]
    sides = {n for t in images for n in t.shape[2:] if n >= 2 * SIDE}
    if sides:
        yield cut_axes(inputs, dict.fromkeys(sides, SIDE) | dict.fromkeys(length, LENGTH) | dict.fromkeys(batch, BATCH))
    for sizes in ({**dict.fromkeys(length, LENGTH), **dict.fromkeys(batch, BATCH)}, dict.fromkeys(batch, BATCH)):
        if sizes:
            yield cut_axes(inputs, sizes)
    if length and batch:
        yield cut_axes(inputs, dict.fromkeys(length, LENGTH))


def cut_axes(inputs: Inputs, sizes: dict[int, int]) -> Inputs:
    """Shorten every axis of one of these lengths, in all tensors."""

    def shorter(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            for axis, size in enumerate(leaf.shape):
                leaf = leaf.narrow(axis, 0, sizes.get(size, size))
            return leaf.clone()
        return leaf

    args, kwargs = pytree.tree_map(shorter, (inputs.args, inputs.kwargs))
    return Inputs(args, kwargs, inputs.spans)


def same_program(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same operations, node by node, on the same values; sizes aside.

    An axis of several elements must not become one of a single element, along which everything is constant.
    """
    return one.outputs == other.outputs and [describe_node(n) for n in one.nodes.values()] == [
        describe_node(n) for n in other.nodes.values()
    ]


def describe_node(node: Node) -> tuple[object, ...]:
    single = tuple(n == 1 for n in node.shape)
    return node.name, node.op, str(node.target), single, node.dtype, without_sizes((node.args, node.kwargs))


def without_sizes(value: object) -> object:
    """Arguments without integers, which may be lengths."""
    if isinstance(value, (tuple, list)):
        return [without_sizes(v) for v in value]
    if isinstance(value, dict):
        return {k: without_sizes(v) for k, v in value.items()}
    return (
        int
        if isinstance(value, int) and not isinstance(value, bool)
        else value
        if isinstance(value, Ref)
        else str(value)
    )
