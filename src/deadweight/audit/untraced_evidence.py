"""Evidence without a graph: the gradients of a module that cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.audit.result import Unknown
from deadweight.errors import DeadweightError
from deadweight.graph.trace import first_line
from deadweight.source.model import Source
from deadweight.source.narrow_clone import narrow
from deadweight.source.randomise import randomise

ZERO = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative to a typical gradient: rounding leaves 1e-15 and 1e-7


def own_precision(module: nn.Module) -> torch.dtype:
    """The dtype of its parameters: a clone is in float32 where the model's code does not run in float64."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)


def untraced_evidence(source: Source) -> Iterator[Unknown]:
    """Parameters whose gradients are zero, in float64 unless the narrow clone only runs in float32."""
    try:
        small = source if source.config is None else narrow(source)
    except DeadweightError as error:
        yield Unknown("*", None, f"no evidence could be taken either: {error}")
        return
    dtype = torch.float64 if small is source else own_precision(small.module)
    module = randomise(small.module, 0).to(dtype)
    totals: dict[str, Tensor] = {}
    for seed in range(4):
        args, kwargs = small.inputs.cast(dtype).draw(torch.Generator().manual_seed(seed))
        module.zero_grad()
        try:
            out = module(*args, **kwargs)
        except Exception as error:
            raise DeadweightError(
                f"{source.name} does not run on its example inputs in {str(dtype).removeprefix('torch.')} "
                f"({first_line(error)}); expected a model and inputs that can be cast to it"
            ) from error
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if not leaves:
            raise DeadweightError(
                f"{source.name} returns no tensor with a gradient to its parameters; expected one: what passes through "
                "detach(), numpy or a Python number has none"
            )
        try:
            torch.stack([(t * torch.randn_like(t)).sum().real for t in leaves]).sum().backward()
        except Exception as error:  # noqa: BLE001 - operations without a derivative
            yield Unknown("*", None, f"no evidence could be taken either: {first_line(error)}")
            return
        for name, p in module.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad.abs()
            totals[name] = torch.maximum(totals.get(name, torch.zeros_like(grad)), grad)
    typical = torch.cat([t.reshape(-1) for t in totals.values()]).mean()
    if not bool(torch.isfinite(typical)):
        yield Unknown("*", None, "no evidence could be taken either: the gradients are not finite")
    for name, total in totals.items():
        count = int((total < ZERO[dtype] * typical).sum())
        if count and total.ndim <= 1:
            yield Unknown(name, None, f"{count} of {total.numel()} elements have no gradient; not proved")
