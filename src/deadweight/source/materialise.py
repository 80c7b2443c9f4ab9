"""A model on the meta device gets random parameters, for a trace that needs values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from deadweight.source.model import Source
from deadweight.source.module_copies import copy_tensors
from deadweight.source.randomise import fill

MOST_PARAMETERS = 200_000_000  # 0.8 GB in float32


def with_values(source: Source) -> Source | None:
    """The same model on the CPU, with random parameters; None if it has weights already, or is too large."""
    n_parameters = sum(p.numel() for p in source.module.parameters())
    if source.has_weights or n_parameters > MOST_PARAMETERS:
        return None
    module = copy_tensors(source.module).to_empty(device="cpu")
    zero(module)
    initialise = getattr(
        module, "_init_weights", None
    )  # of transformers: it computes buffers, rotary angles among them
    if source.config is not None and initialise is not None:
        with torch.no_grad():
            module.apply(initialise)
    fill(module, seed=0)
    return replace(source, module=module, args=source.inputs.args, kwargs=source.inputs.kwargs, has_weights=True)


@torch.no_grad()
def zero(module: nn.Module) -> None:
    """Set all parameters and buffers to zero: they are uninitialised memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.zero_()
