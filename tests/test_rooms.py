"""The rooms of the house: what imports what, and that no room imports one that lies above it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "deadweight"
# small, and imported by anyone
COMMON = {"errors", "embedded", "notebook", "progress", "silence", "threads", "version"}
FLOORS = (  # from the ground up: a room may import what stands before it
    ("slim", "the runtime that travels with a checkpoint: layers, attention, heads, caches and their codes"),
    ("transformer", "our own transformer, of any shape"),
    ("source", "opens a model: folder, hub id, config or module; example inputs, narrow clones, text and tokens"),
    ("save", "checkpoints: what is stored, how it is written in shards, how it is loaded"),
    ("graph", "traces a model into a graph with few kinds of operations"),
    ("proof", "labels, exact arithmetic, and the rules that carry both through a graph"),
    ("claims", "what a proof says about parameters, and the directions that it calls redundant"),
    ("search", "which changes to try, which spaces there are, what has been proved so far"),
    ("rewrite", "what a claim does to the weights"),
    ("laws", "one file per law: its searches, its rewrite, its page; and the catalogue of all laws"),
    ("audit", "findings with evidence, unknown parameters, and the account"),
    ("reduce", "plans, tries, verifies and writes the rewrites"),
    ("train", "training runs and sweeps"),
    ("evaluate", "loss, speed and cache size of a model"),
    ("compress", "smaller heads and key-value caches, at a measured loss"),
    ("saturation", "how sensitive each head is to its logits"),
    ("allocate", "number and size of heads, by an exact solver"),
    ("report", "results as tables, JSON, HTML pages and plots"),
    ("deadweight", "the library's own functions, imported when they are used"),
    ("testing", "the audit as an assertion"),
    ("cli", "the command line, one file per subcommand"),
    ("__main__", "python -m deadweight"),
)
ORDER = [name for name, _ in FLOORS]
Edges = dict[tuple[str, str], list[str]]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(file: Path) -> list[str]:
    """The modules of ours that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "deadweight":
            inside = [f"deadweight.{a.name}" for a in node.names if is_module(a.name)]
            found += inside or ["deadweight"]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("deadweight."):
            found.append(str(node.module))
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            found.append("deadweight")  # out of its own room, without saying where to
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "deadweight"]
    return found


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def edges(package: Path = PACKAGE) -> Edges:
    found: Edges = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package).with_suffix("").parts
        own = "deadweight" if inside == ("__init__",) else inside[0]
        for module in imports_of(file):
            if room(module) != own:
                found[own, room(module)].append("/".join(inside))
    return dict(found)


def pointing_back(found: Edges) -> list[str]:
    """Edges from a room to one above it; anything but the common files has its floor."""
    wrong = []
    for (above, below), files in found.items():
        if above in COMMON and below not in COMMON:
            wrong.append(f"{above} imports {below}, and is imported by all ({files[0]})")
        elif above not in COMMON and below not in COMMON and ORDER.index(above) <= ORDER.index(below):
            wrong.append(f"{above} imports {below}, which stands above it ({', '.join(sorted(set(files)))})")
    return wrong


def drawing(found: Edges) -> str:
    """The rooms from the ground up, each with those it imports."""
    lines = []
    for name, what in FLOORS:
        below = [b for b in ORDER if (name, b) in found]
        lines.append(f"{name:12} {what}")
        if below:
            lines.append(f"{'':12} ← {', '.join(below)}")
    return "\n".join(lines)


def test_no_room_imports_one_above_it() -> None:
    assert pointing_back(edges()) == []


def test_every_room_has_its_floor() -> None:
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))}
    assert rooms - {"__init__"} - COMMON == set(ORDER) - {"deadweight"}


@pytest.mark.parametrize(
    "back", [("laws", "audit"), ("save", "reduce"), ("rewrite", "laws"), ("source", "graph"), ("errors", "source")]
)
def test_an_edge_that_points_back_is_seen(back: tuple[str, str]) -> None:
    assert len(pointing_back({**edges(), back: ["a/file"]})) == 1


def test_contributing_shows_the_rooms_as_they_are() -> None:
    assert drawing(edges()) in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(drawing(edges()))
