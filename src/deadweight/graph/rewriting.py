"""One pass over a Graph that replaces operations by what stands for them: the rules are in canonical.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from deadweight.graph.node import Argument, Graph, Node, Ref, Target, substitute
from deadweight.graph.outputs import returned
from deadweight.source.private import schema

aten = torch.ops.aten
Replacement = Ref | tuple[Ref, ...] | None  # of an operation with several results: one for each
Rewrite = Callable[["Canonicaliser", Node], Replacement]
REWRITES: dict[str, Rewrite] = {}


Registered = TypeVar("Registered", bound=Rewrite)


def rewrites(*ops: str) -> Callable[[Registered], Registered]:
    def register(function: Registered) -> Registered:
        REWRITES.update(dict.fromkeys(ops, function))
        return function

    return register


class Canonicaliser:
    """One pass over the nodes; `alias` maps an old node to what stands for it now, `results` to one for each result."""

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
        return returned(dataclasses.replace(graph, nodes=kept))

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
        self, name: str, op: str, target: Target | None, args: tuple[Argument, ...], shape: tuple[int, ...], like: Node
    ) -> Ref:
        """A new node; `like` lends its dtype."""
        self.nodes[name] = Node(name, op, target, args, {}, shape, like.dtype)
        return Ref(name)

    def affine(self, node: Node, core: Ref, weight: Argument, bias: Argument, view: list[int] | None = None) -> Ref:
        """core · weight + bias, each step its own node; `view` aligns a channel vector with its axis."""
        for part, op, target in ((weight, "aten.mul", aten.mul.Tensor), (bias, "aten.add", aten.add.Tensor)):
            if part is not None:
                factor = self.aligned(node, part, view, op)
                core = self.emit(f"{node.name}_{op[5:]}", op, target, (core, factor), node.shape, node)
        return core

    def aligned(self, node: Node, part: Ref, view: list[int] | None, op: str) -> Ref:
        if view is None:
            return part
        name = f"{node.name}_{op[5:]}_view"
        return self.emit(name, "aten.reshape", aten.reshape.default, (part, view), tuple(view), node)


def argument(node: Node, position: int, name: str, default: Argument = None) -> Argument:
    """An argument that may have been passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def by_name(node: Node) -> dict[str, Argument]:
    """Arguments by the names of the operation's schema: overloads put them at different places."""
    names = [argument.name for argument in schema(node.target).arguments]  # type: ignore[arg-type]
    return dict(zip(names, node.args, strict=False)) | node.kwargs
