"""One pass over a Graph that replaces operations by canonical ones; the rewrites register themselves by operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from deadweight.graph.node import Argument, Graph, Node, Operation, Ref, substitute
from deadweight.graph.operations import ADD, MUL, RESHAPE
from deadweight.graph.outputs import add_output_nodes
from deadweight.source.private_api import schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Replacement = Ref | tuple[Ref, ...] | None  # one Ref per result of the operation; None: it stays as it is
Rewrite = Callable[["Canonicaliser", Node], Replacement]
REWRITES: dict[str, Rewrite] = {}


Registered = TypeVar("Registered", bound=Rewrite)
Arguments = TypeVar("Arguments", bound="DataclassInstance")


def rewrites(*ops: str) -> Callable[[Registered], Registered]:
    def register(function: Registered) -> Registered:
        assert not REWRITES.keys() & set(ops), f"two rewrites of {REWRITES.keys() & set(ops)}"
        REWRITES.update(dict.fromkeys(ops, function))
        return function

    return register


class Canonicaliser:
    """One pass over the nodes; `alias` maps an old node to its replacement, `results` to one per result."""

    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.nodes: dict[str, Node] = {}
        self.alias: dict[str, str] = {}
        self.results: dict[str, tuple[Ref, ...]] = {}

    def run(self) -> Graph:
        for node in self.old.nodes.values():
            if node.name in self.old.live or node.op in ("parameter", "input"):
                self.visit(self.redirect(node))
        outputs = tuple(self.alias.get(name, name) for name in self.old.outputs)
        graph = dataclasses.replace(self.old, nodes=self.nodes, outputs=outputs)
        live = graph.live
        kept = {k: n for k, n in self.nodes.items() if k in live or n.op in ("parameter", "input")}
        return add_output_nodes(dataclasses.replace(graph, nodes=kept))

    def redirect(self, node: Node) -> Node:
        def rename(name: str) -> Ref:
            return Ref(self.alias.get(name, name))

        return dataclasses.replace(node, args=substitute(node.args, rename), kwargs=substitute(node.kwargs, rename))

    def visit(self, node: Node) -> None:
        rewrite = REWRITES.get(node.op)
        if node.op == "getitem" and node.args[0].name in self.results:
            self.alias[node.name] = self.results[node.args[0].name][node.args[1]].name
            return
        result = rewrite(self, node) if rewrite else None
        if result is None:
            self.nodes[node.name] = node
        elif isinstance(result, tuple):
            self.results[node.name] = result
        else:
            self.alias[node.name] = result.name

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.nodes[ref.name].shape

    def emit(
        self, name: str, operation: Operation, args: tuple[Argument, ...], shape: tuple[int, ...], like: Node
    ) -> Ref:
        """Write a new node; its dtype and its origin are those of `like`."""
        self.nodes[name] = Node(name, operation.name, operation.target, args, {}, shape, like.dtype, like.origin)
        return Ref(name)

    def affine(self, node: Node, core: Ref, weight: Argument, bias: Argument, view: list[int] | None = None) -> Ref:
        """core · weight + bias, one node each; `view` is the shape that aligns a vector with the channel axis."""
        for part, name, operation in ((weight, f"{node.name}_mul", MUL), (bias, f"{node.name}_add", ADD)):
            if part is not None:
                if view is not None:
                    part = self.emit(f"{name}_view", RESHAPE, (part, view), tuple(view), node)
                core = self.emit(name, operation, (core, part), node.shape, node)
        return core


def argument(node: Node, position: int, name: str, default: Argument = None) -> Argument:
    """An argument that may have been passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def arguments_by_name(node: Node) -> dict[str, Argument]:
    """Arguments by the names of the operation's schema: overloads put them at different positions."""
    names = [argument.name for argument in schema(node.target).arguments]  # type: ignore[arg-type]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def arguments_as(kind: type[Arguments], node: Node) -> Arguments:
    """The arguments of a node as a dataclass whose fields have the names of the operation's schema."""
    given = arguments_by_name(node)
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given})
