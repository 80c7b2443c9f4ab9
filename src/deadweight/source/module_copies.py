"""Copies of a module, so that the user's own is never changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from deadweight.source.type_aliases import Leaf

Memo = dict[int, Leaf]
DEEPEST = 5  # containers and functions in each other that are looked through for what they hold


def share_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module's structure that holds the same parameters and buffers.

    A table with `max_norm` is copied: running such a module changes it.
    """
    renormed = {id(p) for m in module.modules() if getattr(m, "max_norm", None) is not None for p in m.parameters()}
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in renormed}
    memory = {address(t) for t in shared.values()} - {None}
    views = (t for m in module.modules() for t in tensor_attributes(m) if t.is_leaf and address(t) in memory)
    shared |= {id(t): t for t in views}  # weight.data under another name
    return copy_module(module, shared, lambda tensor: tensor if id(tensor) in shared else copy.deepcopy(tensor))


def address(tensor: Tensor) -> int | None:
    """The address of its data; None if it has none."""
    dense = tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0
    return tensor.data_ptr() if dense else None


def copy_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module and of everything that it holds."""
    return copy_module(module, {}, copy.deepcopy)


def copy_module(module: nn.Module, known: Memo, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deepcopy that shares the known objects; a module that deepcopy rejects is rebuilt part by part."""
    memo = known | derived_tensors(module)
    try:
        copied_module = copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - the module's own __deepcopy__, or an attribute that cannot be copied
        copied_module = rebuilt(module, tensor, memo := {})
    rebind_closures(copied_module, memo)
    return copied_module


def rebind_closures(module: nn.Module, memo: Memo) -> None:
    """Make functions stored in the copy use the copy: `self.f = lambda x: self.layer(x)` would use the original.

    deepcopy does not copy functions. `memo` maps the ids of the original's objects to their copies.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                vars(part)[name] = rebound(value, memo, 0)


def rebound(value: Leaf, memo: Memo, depth: int) -> Leaf:
    """The value with copies in place of originals, also in closures; the same object if nothing changes."""
    if isinstance(value, (nn.Module, Tensor)):
        return memo.get(id(value), value)
    if depth == DEEPEST:
        return value
    again = partial(rebound, memo=memo, depth=depth + 1)
    if isinstance(value, MethodType):
        owner = again(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, FunctionType):
        return with_closure(value, [again(cell_contents(cell)) for cell in value.__closure__ or ()])
    if isinstance(value, partial):
        old = [value.func, *value.args, *value.keywords.values()]
        parts: list[Leaf] = [again(v) for v in old]
        named = dict(zip(value.keywords, parts[1 + len(value.args) :], strict=True))
        given = parts[1 : 1 + len(value.args)]
        return value if same_objects(parts, old) else partial(parts[0], *given, **named)
    if type(value).__name__ in ("list", "tuple"):
        parts = [again(v) for v in value]
        return value if same_objects(parts, value) else type(value)(parts)
    if type(value).__name__ in ("dict", "OrderedDict"):
        parts = [again(v) for v in value.values()]
        return value if same_objects(parts, value.values()) else type(value)(zip(value, parts, strict=True))
    return value


def with_closure(function: FunctionType, contents: list[Leaf]) -> FunctionType:
    cells = function.__closure__ or ()
    if same_objects(contents, [cell_contents(cell) for cell in cells]):
        return function
    pairs = zip(cells, contents, strict=True)
    closure = tuple(cell if new is cell_contents(cell) else CellType(new) for cell, new in pairs)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def cell_contents(cell: CellType) -> Leaf:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later, or never
        return None


def same_objects(some: Iterable[object], others: Iterable[object]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


def derived_tensors(module: nn.Module) -> Memo:
    """Tensors that a hook computed from parameters and stored, by id: deepcopy rejects them, so they are detached."""
    return {id(t): t.detach() for m in module.modules() for t in tensor_attributes(m) if not t.is_leaf}


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that are plain attributes, neither parameters nor buffers."""
    return (value for value in vars(module).values() if isinstance(value, Tensor))


def rebuilt(module: nn.Module, tensor: Callable[[Tensor], Tensor], done: Memo) -> nn.Module:
    """The same class with the same attributes; submodules are rebuilt, tensors taken from `tensor`, the rest shared."""
    if id(module) in done:
        return done[id(module)]
    clone = done[id(module)] = object.__new__(type(module))
    attributes = vars(clone)
    for name, value in vars(module).items():
        attributes[name] = copy.copy(value) if type(value).__name__ in ("list", "dict", "set", "OrderedDict") else value
    for table in ("_parameters", "_buffers", "_modules"):
        for name, value in attributes[table].items():
            if isinstance(value, nn.Module):
                attributes[table][name] = rebuilt(value, tensor, done)
            elif value is not None:
                attributes[table][name] = done.setdefault(id(value), tensor(value))
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and id(value.__self__) in done:
            attributes[name] = MethodType(value.__func__, done[id(value.__self__)])
    return clone
