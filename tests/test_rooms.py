"""The folders of src/deadweight: what imports what, and that no folder imports one that stands after it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "deadweight"
# small, and imported by anyone
COMMON = {"errors", "embedded", "notebook", "progress", "silence", "threads", "version"}
FOLDERS = (  # in reading order: a folder may import what stands before it
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
    ("lint", "the audit as a check: settings in pyproject.toml, accepted findings, a baseline"),
    ("reduce", "plans, tries, verifies and writes the rewrites"),
    ("train", "training runs and sweeps"),
    ("evaluate", "loss, speed and cache size of a model"),
    ("compress", "smaller heads and key-value caches, at a measured loss"),
    ("saturation", "how sensitive each head is to its logits"),
    ("allocate", "number and size of heads, by an exact solver"),
    ("report", "results as tables, JSON, HTML pages, SARIF, annotations and plots"),
    ("deadweight", "the library's own functions, imported when they are used"),
    ("testing", "the audit as an assertion"),
    ("callbacks", "an audit before the first step of training, for transformers and Lightning"),
    ("pytest_plugin", "the check as tests, and a fixture"),
    ("cli", "the command line, one file per subcommand"),
    ("__main__", "python -m deadweight"),
)
ORDER = [name for name, _ in FOLDERS]
Edges = dict[tuple[str, str], list[str]]


def folder_of(module: str) -> str:
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
            found.append("deadweight")  # a relative import out of its own folder
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
            if folder_of(module) != own:
                found[own, folder_of(module)].append("/".join(inside))
    return dict(found)


def pointing_back(found: Edges) -> list[str]:
    """Edges from a folder to a later one; every folder has its place in the order."""
    wrong = []
    for (above, below), files in found.items():
        if above in COMMON and below not in COMMON:
            wrong.append(f"{above} imports {below}, and is imported by all ({files[0]})")
        elif above not in COMMON and below not in COMMON and ORDER.index(above) <= ORDER.index(below):
            wrong.append(f"{above} imports {below}, which stands after it ({', '.join(sorted(set(files)))})")
    return wrong


def drawing(found: Edges) -> str:
    """The folders in reading order, each with those it imports."""
    lines = []
    for name, what in FOLDERS:
        below = [b for b in ORDER if (name, b) in found]
        lines.append(f"{name:12} {what}")
        if below:
            lines.append(f"{'':12} ← {', '.join(below)}")
    return "\n".join(lines)


def test_no_folder_imports_a_later_one() -> None:
    assert pointing_back(edges()) == []


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))}
    assert folders - {"__init__"} - COMMON == set(ORDER) - {"deadweight"}


@pytest.mark.parametrize(
    "back", [("laws", "audit"), ("save", "reduce"), ("rewrite", "laws"), ("source", "graph"), ("errors", "source")]
)
def test_an_edge_that_points_back_is_seen(back: tuple[str, str]) -> None:
    assert len(pointing_back({**edges(), back: ["a/file"]})) == 1


def test_contributing_shows_the_folders_as_they_are() -> None:
    assert drawing(edges()) in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def missing_files(page: str) -> list[str]:
    """Files and folders that the table of changes names and that do not exist; a bare name is beside the one before."""
    missing = []
    for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE):
        beside = PACKAGE
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", cell):
            place = next((p for p in (PACKAGE / name, ROOT / name, beside / name) if p.exists()), None)
            missing += [] if place is not None else [name]
            beside = beside if place is None else place if place.is_dir() else place.parent
    return missing


def test_every_file_that_contributing_sends_a_change_to_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert page.count(".py` |") > 10
    assert missing_files(page) == []


def test_a_file_that_does_not_exist_is_named() -> None:
    assert missing_files("| a change | `laws/law.py`, `page.py`, `nowhere.py`, `search/spaces.py` |") == ["nowhere.py"]


if __name__ == "__main__":
    print(drawing(edges()))
