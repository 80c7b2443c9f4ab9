"""Generic parameters: random ones, for which nothing vanishes, coincides or saturates by accident."""

from __future__ import annotations

import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.module_copies import copy_tensors
from deadweight.source.printable import printable

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """A float64 copy with random parameters; tied parameters stay tied, buffers keep their values.

    Norm gains are 1 + 0.3 n, biases 0.5 n, embeddings 0.5 n, weights n / sqrt(fan in), with n standard normal.
    """
    _refuse_meta(module)
    clone = copy_tensors(module).double()
    return fill(clone, seed)


@torch.no_grad()
def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module itself, with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for owner in module.modules():
        _free_gradients(owner)
        _randomise_statistics(owner, generator)
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen and parameter.is_floating_point():
                seen.add(id(parameter))
                parameter.copy_(_generic(owner, name, parameter, generator))
    return module


def _generic(owner: nn.Module, name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if "bias" in name or isinstance(owner, nn.Embedding):
        return 0.5 * noise
    if parameter.ndim <= 1:
        return 1 + 0.3 * noise
    fan_in = parameter[0].numel() if isinstance(owner, CONVOLUTIONS) else parameter.shape[-1]
    return noise / max(fan_in, 1) ** 0.5


def _randomise_statistics(owner: nn.Module, generator: torch.Generator) -> None:
    """Running means 0.3 n and running variances in 0.5..1.5."""
    if isinstance(owner, BATCH_NORMS) and owner.running_mean is not None and owner.running_var is not None:
        shape = owner.running_mean.shape
        owner.running_mean.copy_(0.3 * torch.randn(shape, generator=generator, dtype=torch.float64))
        owner.running_var.copy_(0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))


def _free_gradients(owner: nn.Module) -> None:
    """Remove padding_idx: the row is read like any other but gets no gradient, and the function is the same."""
    if type(owner) is nn.Embedding:
        owner.padding_idx = None


def _refuse_meta(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise DeadweightError(
                f"{printable(name)} is on the meta device and has no values; expected a module on the CPU: "
                "build it there, or use narrow()"
            )
