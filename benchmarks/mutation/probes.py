"""Putting changed code into functions that are already imported, and finding which tests could notice a change.

A probe evaluates a condition and each of its mutants side by side. A test in which none of them ever differs from the
condition cannot fail because of the mutant, and need not be run.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from mutation.operators import Mutant, Place, at, put, replaced

Sources = dict[str, str]  # the text of each file, as it was when the mutants were made
PROBE = "_deadweight_probe"
REACHED = "_deadweight_reached"
IMPURE = {"take", "next", "promise"}  # what calls these is not evaluated twice: it counts as another value


def module_of(file: str) -> ModuleType:
    """The module of a source file, named from the package's folder."""
    name = ".".join(("deadweight", *Path(file).with_suffix("").parts))
    return importlib.import_module(name.removesuffix(".__init__"))


def install(file: str, tree: ast.Module) -> None:
    """Give every function of a module the code that the tree has for it."""
    module = module_of(file)
    assert module.__file__ is not None
    new = {code.co_qualname: code for code in codes_in(compile(tree, module.__file__, "exec"))}
    for function in functions_in(module):
        function.__code__ = new[function.__qualname__]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, behind properties and the like."""
    assert module.__file__ is not None
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for member in members:
            for name in ("fget", "func", "__func__"):
                member = getattr(member, name, None) or member
            if isinstance(member, FunctionType) and member.__code__.co_filename == module.__file__:
                yield member


def install_mutant(sources: Sources, mutant: Mutant) -> None:
    """Change one condition in the running process."""
    install(mutant.file, replaced(ast.parse(sources[mutant.file]), mutant))


class Probes:
    """Which mutants differed from their original since the last time one asked."""

    def __init__(self, sources: Sources, mutants: Sequence[Mutant]) -> None:
        self.differing: set[int] = set()
        vars(builtins)[PROBE], vars(builtins)[REACHED] = self.probe, self.differing.add
        by_file: dict[str, list[tuple[int, Mutant]]] = {}
        for number, mutant in enumerate(mutants):
            by_file.setdefault(mutant.file, []).append((number, mutant))
        for file, numbered in by_file.items():
            install(file, probed(ast.parse(sources[file]), numbered))

    def probe(self, value: Any, others: tuple[tuple[int, bool, Callable[[], Any]], ...]) -> Any:
        """The value itself; notes every mutant whose value is another, or none."""
        for number, truth, other in others:
            if number not in self.differing and not same(value, other, truth=truth):
                self.differing.add(number)
        return value

    def taken(self) -> set[int]:
        result = set(self.differing)
        self.differing.clear()
        return result


def same(value: Any, other: Callable[[], Any], *, truth: bool) -> bool:
    try:
        result = other()
        if truth:
            return bool(result) == bool(value)
        if isinstance(value, torch.Tensor):
            return isinstance(result, torch.Tensor) and torch.equal(value, result)
        return bool(value == result)
    except Exception:  # noqa: BLE001 - a mutant that cannot be computed differs
        return False


def probed(tree: ast.Module, mutants: Sequence[tuple[int, Mutant]]) -> ast.Module:
    """The module with a probe at every place that has mutants; places inside others come first."""
    places: dict[Place, list[tuple[int, Mutant]]] = {}
    for number, mutant in mutants:
        places.setdefault(mutant.path, []).append((number, mutant))
    for path in sorted(places, key=len, reverse=True):
        node = at(tree, path)
        if isinstance(node, ast.stmt):
            put(tree, path, ast.If(ast.Constant(True), [*map(reached, places[path]), node], []))
        else:
            put(tree, path, compared(node, places[path]))
    return ast.fix_missing_locations(tree)


def reached(numbered: tuple[int, Mutant]) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(numbered[0])], []))


def compared(node: ast.AST, mutants: Sequence[tuple[int, Mutant]]) -> ast.Call:
    """PROBE(expression, ((number, truth, lambda: mutant), …))."""
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    others = []
    for number, mutant in mutants:
        other = ast.Lambda(none, ast.parse("1 / 0", mode="eval").body if impure(mutant) else mutant.replacement)
        others.append(ast.Tuple([ast.Constant(number), ast.Constant(mutant.truth), other], ast.Load()))
    return ast.Call(ast.Name(PROBE, ast.Load()), [node, ast.Tuple(others, ast.Load())], [])


def impure(mutant: Mutant) -> bool:
    calls = (n.func for n in ast.walk(mutant.replacement) if isinstance(n, ast.Call))
    return any(getattr(f, "attr", getattr(f, "id", "")) in IMPURE for f in calls)
