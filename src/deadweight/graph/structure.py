"""What goes into a forward and what comes out of it, as tensors with names."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.graph.program import TraceError

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, range)


def tensors_in(value: Any, _depth: int = 0) -> Iterator[Tensor]:
    """Every tensor that a forward returns, in order; refuses what may hold tensors that cannot be seen."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif inside := fields_of(leaf):
            if _depth > 8:
                raise TraceError(f"forward returns a {type(leaf).__name__} that is nested without end")
            yield from tensors_in(list(inside.values()), _depth + 1)
        elif not isinstance(leaf, PLAIN) and not dataclasses.is_dataclass(leaf):
            raise TraceError(
                f"forward returns a {type(leaf).__name__}; expected tensors, or tuples, lists, dicts and dataclasses "
                "of them"
            )


def fields_of(leaf: Any) -> dict[str, Any]:
    """The fields of an object that pytree does not look into."""
    if isinstance(leaf, (*PLAIN, Tensor, type)) or callable(leaf):
        return {}
    if isinstance(leaf, Mapping):
        return {str(key): value for key, value in leaf.items()}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(vars(leaf)) if hasattr(leaf, "__dict__") else {}


def refuse_hidden_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if an input holds tensors that would pass for constants."""
    for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        hidden = [name for name, value in fields_of(leaf).items() if isinstance(value, Tensor)]
        if hidden:
            raise TraceError(
                f"input {path_name(path)} is a {type(leaf).__name__} that holds tensors ({', '.join(hidden)}); "
                "expected tensors in tuples, lists or dicts, or a class known to torch.export.register_dataclass"
            )


def input_names(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """One name for every leaf of the inputs: its argument's, and where in it the leaf stands."""
    try:
        positional = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        positional = []
    names = []
    for path, _ in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        place = getattr(path[1], "idx", None)
        first = path_name(path[1:2]) if place is None else positional[place] if place < len(positional) else "args"
        rest = path[2:] if first != "args" else path[1:]
        names.append("_".join([first, *(path_name((key,)) for key in rest)]))
    return names


def path_name(path: Any) -> str:
    """The place of a leaf in words that may be part of a name."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    return "_".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
