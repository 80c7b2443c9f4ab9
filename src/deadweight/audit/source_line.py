"""The line of code to look at for a parameter: where its module is constructed, else where the parameter is used."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

from torch import nn

from deadweight.audit.result import SourceLine
from deadweight.graph.node import Graph
from deadweight.graph.origin import is_library, is_readable


def source_line(module: nn.Module, graph: Graph, node: str) -> SourceLine | None:
    """Where the user's code constructs the module of a parameter; else where it uses the parameter; else a library's.

    A construction is the only assignment `self.name = …` of a class on the way from the parameter to the model.
    """
    built = list(constructions(module, graph.parameters[node]))
    own = [line for line in built if not is_library(line.file)]
    used = uses(graph, node)
    best = [*own[:1], *(line for line in used if not is_library(line.file)), *built[:1], *used]
    return best[0] if best else None


def constructions(module: nn.Module, parameter: str) -> Iterator[SourceLine]:
    """Lines that assign the parameter, its module, the module around that, and so on, from the inside out."""
    words = parameter.split(".")
    for depth in reversed(range(len(words))):
        try:
            owner = module.get_submodule(".".join(words[:depth]))
        except AttributeError:  # a module that names its parameters in its own way
            continue
        file_and_line = assignment(type(owner), words[depth])  # type: ignore[arg-type]
        if file_and_line is not None:
            yield SourceLine(*file_and_line, "constructed")


@cache
def assignment(kind: type, name: str) -> tuple[str, int] | None:
    """File and line of the only `self.name = …` in a class or the classes it inherits from; torch's do not count."""
    for base in kind.__mro__:
        lines = assigned(base).get(name, [])
        if lines:
            return lines[0] if len(lines) == 1 else None
    return None


@cache
def assigned(kind: type) -> dict[str, list[tuple[str, int]]]:
    """Attribute names to the lines where a class assigns them; empty where its code cannot be read."""
    try:
        file = inspect.getsourcefile(kind)
        source, start = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return {}
    if file is None or not is_readable(file):
        return {}
    lines: dict[str, list[tuple[str, int]]] = {}
    for statement in ast.walk(tree):
        for name in assigned_names(statement):
            lines.setdefault(name, []).append((file, start + statement.lineno - 1))  # type: ignore[attr-defined]
    return lines


def assigned_names(statement: ast.AST) -> Iterator[str]:
    """The names that a statement assigns on self; `self.name = None` assigns nothing worth looking at."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return
    if isinstance(statement.value, ast.Constant) and statement.value.value is None:
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        for part in parts:
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                yield part.attr


def uses(graph: Graph, node: str) -> list[SourceLine]:
    """Lines whose operations read the parameter, in the order of execution."""
    origins = [reader.origin for reader in graph.users.get(node, ())]
    return [SourceLine(o.file, o.line, "used") for o in origins if o is not None and o.line]
