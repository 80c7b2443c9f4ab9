"""Functions that remember their results: they must forget those of a trace, which are no real tensors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

from torch import nn

Remembering = functools._lru_cache_wrapper
Found = dict[int, Remembering]


@contextmanager
def forgetting_results(module: nn.Module) -> Iterator[None]:
    """Clear the caches (`functools.lru_cache`) of the module's code that computed something in this block.

    A cache outlives the trace, and is shared by all models of a class: later runs would get the trace's fake tensors.
    Caches that only answered keep what they have.
    """
    caches = remembering_functions(module)
    before = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, misses in zip(caches, before, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def remembering_functions(module: nn.Module) -> list[Remembering]:
    """The functions with a cache in the Python modules that define the module's classes."""
    found: Found = {}
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    for name in sorted(names - {"builtins", nn.Module.__module__}):
        home = sys.modules.get(name)
        if home is not None:
            collect(home, name, found)
    return list(found.values())


def collect(home: ModuleType, name: str, found: Found) -> None:
    """Add the caches of the functions of a Python module, and of the classes that it defines."""
    for value in list(vars(home).values()):
        add(value, found)
        if inspect.isclass(value) and value.__module__ == name:
            for attribute in list(vars(value).values()):
                add(attribute, found)


def add(value: object, found: Found) -> None:
    """Add a function if it has a cache, or if it hides a function that has one (a decorator around `lru_cache`)."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, Remembering):
        found[id(value)] = value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if isinstance(content, Remembering):
                found[id(content)] = content
