"""How readable the package is, in numbers: what a change should make smaller.

python scripts/code_statistics.py [FOLDER]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

LONG, MANY, LARGE = 50, 5, 350


def statistics(folder: Path) -> dict[str, int]:
    """Counts over all Python files of a folder."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {
        f"functions over {LONG} lines": sum(lines(f) > LONG for f in functions),
        f"functions with more than {MANY} parameters": sum(parameters(f) > MANY for f in functions),
        "the word Any": sum(isinstance(n, ast.Name) and n.id == "Any" for n in nodes),
        "subscripts by a string": sum(is_string_key(n) for n in nodes),
        f"files over {LARGE} lines": sum(len(f.read_text(encoding="utf-8").splitlines()) > LARGE for f in trees),
        "private attributes of others": sum(is_foreign_private(n) for n in nodes),
    }


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    return len([p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")])


def is_string_key(node: ast.AST) -> bool:
    """`spec["rows"]`, where a field of a value would say what there is; annotations are not meant."""
    key = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def is_foreign_private(node: ast.AST) -> bool:
    """`other._name`, and not `self._name`."""
    private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    return private and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))  # type: ignore[attr-defined]


if __name__ == "__main__":
    for name, count in statistics(Path(sys.argv[1] if len(sys.argv) > 1 else "src/deadweight")).items():
        print(f"{count:6,}  {name}")
