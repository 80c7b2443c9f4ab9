"""What torch and transformers keep private and this package reads: in one place, to be checked with every version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from deadweight.source.type_aliases import Arguments, AutoClass, Keywords, Leaf

__all__ = [
    "OpOverload",
    "base_name",
    "forward_hooks",
    "forward_pre_hooks",
    "model_classes",
    "own_buffers",
    "own_parameters",
    "rename_node",
    "run_own_kernel",
    "schema",
]
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def schema(op: OpOverload) -> torch.FunctionSchema:
    """An operation's arguments and results, and whether it writes into its arguments."""
    return op._schema


def base_name(op: OpOverload) -> str:
    """An operation's name without namespace: "add_" for aten.add_.Tensor."""
    return schema(op).name.removeprefix("aten::")


def run_own_kernel(op: OpOverload, args: Arguments, kwargs: Keywords) -> Tensor:
    """The result of torch's own composite kernel, whatever decomposition is registered for the operation."""
    return op._op_dk(COMPOSITE, *args, **kwargs)


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Give a node this name, or one like it if another node of its graph has it."""
    node._rename(name)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name; None where it could have one and has not."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The same of its buffers."""
    return module._buffers


def forward_hooks(module: nn.Module) -> list[Leaf]:
    return list(module._forward_hooks.values())


def forward_pre_hooks(module: nn.Module) -> list[Leaf]:
    return list(module._forward_pre_hooks.values())


def model_classes(auto: AutoClass) -> Mapping[type, type | tuple[type, ...] | list[type]]:
    """The classes of configs that an AutoModel class knows, each with the class, or classes, of its model."""
    return auto._model_mapping
