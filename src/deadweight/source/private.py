"""What torch and transformers keep private and this package reads: in one place, to be checked with every version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

__all__ = ["OpOverload", "base_name", "forward_hooks", "forward_pre_hooks", "model_classes", "own_parameters", "schema"]


def schema(op: OpOverload) -> torch.FunctionSchema:
    """An operation's arguments and results, and whether it writes into its arguments."""
    return op._schema


def base_name(op: OpOverload) -> str:
    """An operation's name without namespace: "add_" for aten.add_.Tensor."""
    return schema(op).name.removeprefix("aten::")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, those that it does not have (None) among them."""
    return module._parameters


def forward_hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_hooks.values())


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def model_classes(auto: Any) -> Mapping[type, Any]:
    """From the class of a config to the class, or classes, of its model, as an AutoModel class knows them."""
    return auto._model_mapping
