"""Checking a model that is too large to be in memory twice: a few of its layers at a time.

The proofs speak of a short model, with as few blocks as show every kind. Any consecutive blocks of the large model,
put into it, make a model of their own, before and after the reduction: both must be the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import evaluate
from deadweight.reduce.apply import Applied, Weights, apply
from deadweight.reduce.job import Job
from deadweight.reduce.rewrite import Rewrite
from deadweight.reduce.verify import Error, Verification, relative


def check_windows(job: Job, rewrites: Sequence[Rewrite], say: Callable[[str], None]) -> Verification | None:
    """The first and the last blocks, in float64; None where the blocks cannot be told apart from their neighbours."""
    if len(job.source.blocks) != 1 or any(t.is_meta for n, t in job.graph.tensors.items() if is_constant(job, n)):
        return None
    blocks = job.source.blocks[0]
    last = len(blocks.representatives) - blocks.kept
    worst: list[float] = []
    for offset in dict.fromkeys((0, last)):
        say(f"verifying layers {offset} to {offset + blocks.kept - 1}")
        found = one_window(job, rewrites, offset)
        worst = [max(p) for p in zip(worst, found, strict=True)] if worst else found
    return Verification(
        tuple(Error(f"output {i}", e) for i, e in enumerate(worst)),
        f"random inputs, layers 0 to {blocks.kept - 1} and {last} to {last + blocks.kept - 1} by themselves",
    )


def is_constant(job: Job, node: str) -> bool:
    return node not in job.graph.parameters and node not in job.graph.buffers


def one_window(job: Job, rewrites: Sequence[Rewrite], offset: int) -> list[float]:
    blocks = job.source.blocks[0]

    def moved(name: str) -> str:
        index = blocks.index_in(name)
        return name if index is None else blocks.moved(name, index + offset)

    wanted = {moved(n) for n in (*job.graph.parameters.values(), *job.graph.buffers.values())}
    inside = [r for r in rewrites if set(r.touches) <= wanted]
    changed = {n: v for n, v in apply(inside, Weights(job.read), Applied()) if v is not None}

    def values(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        stored = {**job.graph.parameters, **job.graph.buffers}
        return {n: read(moved(stored[n])) if n in stored else t for n, t in job.graph.tensors.items()}

    args, kwargs = job.source.draw(torch.Generator().manual_seed(0))
    inputs = bind(job.graph, args, kwargs)
    outputs = []
    for read in (job.read, lambda n: changed[n] if n in changed else job.read(n)):
        found = evaluate(job.graph, values(read), inputs)
        outputs.append([[o for o in found if isinstance(o, Tensor) and o.is_floating_point()]])
    return relative(outputs[1], outputs[0])
