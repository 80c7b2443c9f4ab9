"""Weights that are not numbers make every measurement meaningless."""

from __future__ import annotations

import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.text import printable


def check_finite(module: nn.Module) -> None:
    """Raise, naming the first parameter that holds NaN or infinity; parameters on the meta device hold nothing."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            continue
        bad = int((~torch.isfinite(parameter.detach())).sum())
        if bad:
            raise DeadweightError(
                f"{printable(name)} holds {bad} values that are NaN or infinite; "
                "expected finite weights: the checkpoint is damaged or its training diverged"
            )
