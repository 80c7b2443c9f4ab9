"""Whether the traced program computes what the model computes: proofs, replay and evidence are about the program."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import RANDOM, Graph, Value
from deadweight.source.model import Source

CLOSE = 1e-2  # relative to the largest output: a model's code may cast to float32 inside
TRIES = 3  # inputs: for one of them, rounding may change which expert is chosen
MASKED = 1e28  # masks fill in larger numbers


@torch.no_grad()
def program_error(graph: Graph, values: dict[str, Value], source: Source, module: nn.Module) -> float | None:
    """The largest difference between the outputs of program and module, relative to the largest output.

    It is the minimum over several inputs. None where the two cannot be compared: with random operations, after a trace
    on values, in training mode, or if the code only runs in float32.
    """
    if graph.specialised or module.training or any(node.op in RANDOM for node in graph.nodes.values()):
        return None
    least: float | None = None
    for seed in range(TRIES):
        args, kwargs = source.draw(torch.Generator().manual_seed(seed))
        try:
            expected = floats(pytree.tree_leaves(module(*args, **kwargs)))
            outputs = floats(evaluate(graph, values, bind(graph, args, kwargs)))
        except Exception:  # noqa: BLE001 - the model's own code
            return least
        if [x.shape for x in expected] != [x.shape for x in outputs]:
            return least
        error = max((apart(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)
        least = error if least is None else min(least, error)
        if least <= CLOSE:
            break
    return least


@torch.no_grad()
def same_buffers(module: nn.Module, original: nn.Module) -> None:
    """Copy the buffers of the original into its clone, where running statistics are random."""
    own = dict(module.named_buffers())
    for name, buffer in original.named_buffers():
        if name in own and own[name].shape == buffer.shape:
            own[name].copy_(buffer)


def floats(leaves: Sequence[object]) -> list[Tensor]:
    return [x.double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest relative difference, without masked entries; infinite where the program alone gives NaN."""
    seen = torch.isfinite(a) & torch.isfinite(b) & (a.abs() < MASKED) & (b.abs() < MASKED)
    if bool((torch.isnan(a) & torch.isfinite(b)).any()):
        return math.inf
    if not bool(seen.any()):
        return 0.0
    return float((a - b)[seen].abs().max() / b[seen].abs().max().clamp(min=1e-12))
