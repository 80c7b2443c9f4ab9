"""Checking a model that is too large to be in memory twice: a few of its layers at a time.

The proofs speak of a short model, with as few blocks as show every kind. Any consecutive blocks of the large model,
put into it, make a model of their own, before and after the reduction: both must be the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import Lazy, evaluate, real_outputs
from deadweight.graph.node import Graph, Node
from deadweight.reduce.apply import Applied, Weights, apply
from deadweight.reduce.job import Job
from deadweight.reduce.rewrite import Rewrite
from deadweight.reduce.verify import Error, Verification, relative


def check_windows(job: Job, rewrites: Sequence[Rewrite], say: Callable[[str], None]) -> Verification | None:
    """The first and the last blocks, in float64; None where the model has no blocks that stand for each other."""
    constants = real_constants(job)
    if len(job.source.blocks) != 1 or constants is None:
        return None
    blocks = job.source.blocks[0]
    last = len(blocks.representatives) - blocks.kept
    worst: list[float] = []
    for offset in dict.fromkeys((0, last)):
        say(f"verifying layers {offset} to {offset + blocks.kept - 1}")
        found = one_window(job, rewrites, offset, constants)
        worst = [max(p) for p in zip(worst, found, strict=True)] if worst else found
    return Verification(
        tuple(Error(f"output {i}", e) for i, e in enumerate(worst)),
        f"random inputs, layers 0 to {blocks.kept - 1} and {last} to {last + blocks.kept - 1} by themselves",
    )


def one_window(job: Job, rewrites: Sequence[Rewrite], offset: int, constants: dict[str, Tensor]) -> list[float]:
    """How far the short model with these blocks moves, per output."""
    blocks = job.source.blocks[0]

    def moved(name: str) -> str:
        index = blocks.index_in(name)
        return name if index is None else blocks.moved(name, index + offset)

    names = {node: moved(name) for node, name in (*job.graph.parameters.items(), *job.graph.buffers.items())}
    inside = [r for r in rewrites if set(r.touches) <= set(names.values())]
    args, kwargs = job.source.draw(torch.Generator().manual_seed(0))
    graph = weights_when_needed(job.graph)
    inputs = bind(graph, args, kwargs)
    reduced = Reduced(job, inside)
    outputs = []
    with torch.no_grad():
        for read in (job.read, reduced.read):
            found = evaluate(graph, OnDemand(graph, names, read, constants), inputs)
            outputs.append([list(real_outputs(found))])
    return relative(outputs[1], outputs[0])


def weights_when_needed(graph: Graph) -> Graph:
    """The same graph with each weight right before the first node that reads it."""
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        if node.op not in ("parameter", "buffer"):
            nodes.update({name: graph.nodes[name] for name in node.inputs if name not in nodes})
            nodes[node.name] = node
    return replace(graph, nodes={**nodes, **{n: v for n, v in graph.nodes.items() if n in graph.outputs}})


class OnDemand(Mapping[str, Tensor | Lazy]):
    """Values by node, each read when it is asked for and not kept."""

    def __init__(
        self, graph: Graph, names: dict[str, str], read: Callable[[str], Tensor | Lazy], constants: dict[str, Tensor]
    ) -> None:
        self.graph, self.names, self.read, self.constants = graph, names, read, constants

    def __getitem__(self, node: str) -> Tensor | Lazy:
        return self.read(self.names[node]) if node in self.names else self.constants[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self.graph.tensors)

    def __len__(self) -> int:
        return len(self.graph.tensors)


class Reduced:
    """Reduced weights in float64, made in the order of the layers, each given out once."""

    def __init__(self, job: Job, rewrites: Sequence[Rewrite]) -> None:
        self.job = job
        self.made: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}  # of weights that are only scaled: they are read again when needed
        self.coming = {name for r in rewrites for name in r.touches}
        self.stream = apply(
            rewrites, Weights(job.read, scaled=lambda _, stored, factor: Lazy(stored, factor)), Applied()
        )

    def read(self, name: str) -> Tensor | Lazy:
        while name in self.coming:
            ready, value = next(self.stream)
            self.coming.discard(ready)
            if isinstance(value, Lazy):
                self.factors[ready] = value.factor
            elif value is not None:
                self.made[ready] = value
        if name in self.factors:
            return Lazy(self.job.read(name), self.factors.pop(name))
        return self.made.pop(name) if name in self.made else self.job.read(name)


def real_constants(job: Job) -> dict[str, Tensor] | None:
    """Tensors that no file stores (rotary frequencies, say), made anew where the model is on shapes alone."""
    found: dict[str, Tensor] = {}
    for node, tensor in job.graph.tensors.items():
        if node in job.graph.parameters or node in job.graph.buffers:
            continue
        if tensor.is_meta:
            made = remade(job.source.module, tensor, job.source.config)
            if made is None:
                return None
            tensor = made
        found[node] = tensor
    return found


def remade(module: nn.Module, buffer: Tensor, config: Any) -> Tensor | None:
    """A buffer's value, from a new instance of the module that holds it, if a config is all that it needs."""
    for owner in module.modules():
        for name, own in owner.named_buffers(recurse=False):
            if own is buffer:
                try:
                    with torch.device("cpu"):
                        fresh: Any = type(owner)(config)
                    value = fresh.get_buffer(name)
                except Exception:  # noqa: BLE001 - the model's own code
                    return None
                return value if value.shape == buffer.shape and not value.is_meta else None
    return None
