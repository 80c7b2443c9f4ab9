"""The inputs and outputs of a forward as tensors with names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.graph.traced_program import TraceError
from deadweight.source.inputs import PLAIN, fields_of, path_name
from deadweight.source.type_aliases import Arguments, Leaf


def tensors_in(value: Leaf, _depth: int = 0) -> Iterator[Tensor]:
    """Every tensor that a forward returns, in order; refuses objects that may hide tensors."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif inside := fields_of(leaf):
            if _depth > 8:
                raise TraceError(f"forward returns a {type(leaf).__name__} nested more than eight levels deep")
            yield from tensors_in(list(inside.values()), _depth + 1)
        elif not isinstance(leaf, PLAIN) and not dataclasses.is_dataclass(leaf):
            raise TraceError(
                f"forward returns a {type(leaf).__name__}; expected tensors, or tuples, lists, dicts and dataclasses "
                "of them"
            )


def input_names(module: nn.Module, args: Arguments, kwargs: Mapping[str, Leaf]) -> list[str]:
    """One name for every leaf of the inputs: that of its argument, and its path inside the argument."""
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
