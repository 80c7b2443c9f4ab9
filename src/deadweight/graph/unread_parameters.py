"""Parameters that a trace on values does not read entirely: such a graph says nothing about them.

An expert that got no token, or a branch that was not taken, looks unused in such a graph. It becomes a constant there,
so that no law makes a claim about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Value, substitute

MOST_NAMES = 3  # in a note
VIEWS = {"view", "reshape", "_unsafe_view", "t", "transpose", "permute", "select", "slice", "split", "unsqueeze"}
VIEWS |= {"squeeze", "expand", "chunk", "unbind", "narrow", "split_with_sizes", "unflatten", "flatten", "numpy_T"}
COPIES = {"clone", "alias", "contiguous", "detach", "_to_copy", "to", "type_as", "lift_fresh_copy"}


def keep_what_is_read(graph: Graph) -> Graph:
    """The same graph with only those parameters that it reads entirely and never together with an empty tensor."""
    beside = beside_nothing(graph)
    graph = with_known_empties(graph)
    if not graph.specialised:
        return graph  # no value was read, so there is one path: what it does not read is never read
    partly = [name for name in graph.parameters if not bool(elements_read(graph, name).all())]
    unread = sorted({*partly, *beside}, key=list(graph.nodes).index)
    if not unread:
        return dataclasses.replace(graph, unused=())
    nodes = graph.nodes | {name: dataclasses.replace(graph.nodes[name], op="buffer") for name in unread}
    parameters = {node: name for node, name in graph.parameters.items() if node not in unread}
    note = (
        f"not examined, since this path does not read all of them: {list_names([graph.parameters[n] for n in unread])}"
    )
    specialised = (*graph.specialised, note)
    return dataclasses.replace(graph, nodes=nodes, parameters=parameters, unused=(), specialised=specialised)


def with_known_empties(graph: Graph) -> Graph:
    """Tensors without elements as constants: the path fixes their shape."""
    empty = [n for n in graph.nodes.values() if 0 in n.shape and n.target is not None and n.dtype is not None]
    nodes = graph.nodes | {n.name: Node(n.name, "buffer", shape=n.shape, dtype=n.dtype) for n in empty}
    tensors = graph.tensors | {n.name: torch.empty(n.shape, dtype=n.dtype) for n in empty}
    return dataclasses.replace(graph, nodes=nodes, tensors=tensors)


def list_names(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def elements_read(graph: Graph, name: str) -> Tensor:
    """For each element of a parameter, whether an operation reads it or an output holds it."""
    shape = graph.nodes[name].shape
    seen = torch.zeros(torch.Size(shape).numel(), dtype=torch.bool)
    for read in leaves_read(graph, name, torch.arange(len(seen)).reshape(shape)):
        seen[read.reshape(-1)] = True
    return seen


def leaves_read(graph: Graph, name: str, elements: Value) -> Iterator[Tensor]:
    """The elements that reach an operation which is not a view or a copy."""
    if name in graph.outputs and isinstance(elements, Tensor):
        yield elements
    for reader in graph.users[name]:
        moved = through_view(reader, name, elements)
        if moved is not None:
            yield from leaves_read(graph, reader.name, moved)
        elif reader.name in graph.live and isinstance(elements, Tensor):
            yield elements


def through_view(node: Node, name: str, elements: Value) -> Value:
    """The elements as a view or copy arranges them; None for other operations."""
    kind = node.op.removeprefix("aten.")
    if node.op == "getitem":
        return elements[node.args[1]]
    if kind in COPIES:
        return elements
    if kind not in VIEWS or node.target is None or set(node.inputs) != {name}:
        return None
    return node.target(*substitute(node.args, lambda _: elements), **node.kwargs)


def beside_nothing(graph: Graph) -> set[str]:
    """Parameters that are combined with an empty tensor, directly or after operations on parameters alone."""
    stack = [name for node in graph.nodes.values() if 0 in node.shape for name in node.inputs]
    names: set[str] = set()
    while stack:
        name = stack.pop()
        if name not in names and graph.depends[name] == (True, False):
            names.add(name)
            stack.extend(graph.nodes[name].inputs)
    return {name for name in names if name in graph.parameters and 0 not in graph.nodes[name].shape}
