"""Copies of a module that leave the user's own alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

Memo = dict[int, Any]


def share_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module's structure that holds the same parameters and buffers.

    A table with `max_norm` is copied: running such a module changes it.
    """
    renormed = {id(p) for m in module.modules() if getattr(m, "max_norm", None) is not None for p in m.parameters()}
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in renormed}
    return copied(module, shared, lambda tensor: tensor if id(tensor) in shared else copy.deepcopy(tensor))


def copy_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module and of everything that it holds."""
    return copied(module, {}, copy.deepcopy)


def copied(module: nn.Module, known: Memo, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """By deepcopy, with these objects as they are; what deepcopy refuses is rebuilt module by module."""
    try:
        return copy.deepcopy(module, known | derived_tensors(module))
    except Exception:  # noqa: BLE001 - the module's own __deepcopy__, or an attribute that cannot be copied
        return rebuilt(module, tensor, {})


def derived_tensors(module: nn.Module) -> Memo:
    """By identity, for deepcopy, which refuses them: tensors that a hook computed from parameters and left behind."""
    return {id(t): t.detach() for m in module.modules() for t in tensor_attributes(m) if not t.is_leaf}


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that are plain attributes: neither parameters nor buffers."""
    return (value for value in vars(module).values() if isinstance(value, Tensor))


def rebuilt(module: nn.Module, tensor: Callable[[Tensor], Tensor], done: Memo) -> nn.Module:
    """The same class with the same attributes; submodules are rebuilt, tensors taken from `tensor`, the rest shared."""
    if id(module) in done:
        return done[id(module)]
    clone = done[id(module)] = object.__new__(type(module))
    attributes = vars(clone)
    for name, value in vars(module).items():
        attributes[name] = copy.copy(value) if type(value).__name__ in ("list", "dict", "set", "OrderedDict") else value
    for table in ("_parameters", "_buffers"):
        for name, value in attributes[table].items():
            attributes[table][name] = done.setdefault(id(value), value if value is None else tensor(value))
    for name, child in module._modules.items():
        attributes["_modules"][name] = None if child is None else rebuilt(child, tensor, done)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and id(value.__self__) in done:
            attributes[name] = MethodType(value.__func__, done[id(value.__self__)])
    return clone
