"""The model as nested boxes: modules in boxes of modules, equal blocks drawn once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deadweight.audit.result import Audit
from deadweight.proof.verdict import Verdict
from deadweight.report.html.layers import spans_blocks
from deadweight.report.name_pattern import ranges

MOST_DRAWN = 300  # parameters in the drawing; a model without repeated blocks may have more


@dataclass(frozen=True)
class Cell:
    """One parameter: how much of it each verdict makes redundant."""

    name: str
    filter: str  # what to search for: its full name, with * for the numbers of equal blocks
    shape: tuple[int, ...]
    marks: tuple[tuple[Verdict, int], ...]  # verdict and dof, strongest first
    codes: tuple[str, ...]
    unknown: str | None  # why nothing could be proved

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def shape_text(self) -> str:
        return " × ".join(f"{n:,}" for n in self.shape) or "1"

    @property
    def kind(self) -> str:
        """The strongest verdict, for its colour; none if no law holds."""
        return self.marks[0][0] if self.marks else ("unknown" if self.unknown is not None else "none")


@dataclass(frozen=True)
class Box:
    """A module: its own parameters and the modules inside. `blocks` names the equal ones that it stands for."""

    name: str
    cells: tuple[Cell, ...]
    boxes: tuple[Box, ...]
    blocks: str = ""
    n_blocks: int = 1
    path: str = ""  # of the list that the blocks are in

    @property
    def title(self) -> str:
        dot = "." if self.blocks and self.name else ""
        return f"{self.path}{self.blocks}{dot}{self.name}"

    @property
    def elements(self) -> int:
        """Of one block."""
        return sum(c.elements for c in self.cells) + sum(b.n_blocks * b.elements for b in self.boxes)

    @property
    def dof(self) -> int:
        """Of one block."""
        own = sum(dof for c in self.cells for _, dof in c.marks)
        return own + sum(b.n_blocks * b.dof for b in self.boxes)

    @property
    def n_cells(self) -> int:
        return len(self.cells) + sum(b.n_cells for b in self.boxes)


@dataclass(frozen=True)
class ModelTree:
    box: Box
    left_out: int  # parameters that are not drawn
    across: tuple[tuple[str, str, int], ...]  # law and dof of findings about all blocks at once, which no cell shows


def draw_model(audit: Audit) -> ModelTree:
    """The boxes of an audited model; without its shapes, those of the parameters with findings."""
    cells = [(name.split("."), cell) for name, cell in make_cells(audit)]
    shown, left_out = cells, 0
    root = build_box("", shown)
    if root.n_cells > MOST_DRAWN:
        shown = cells[:MOST_DRAWN]
        left_out, root = len(cells) - MOST_DRAWN, build_box("", shown)
    across = tuple(sorted({(f.code, f.law, f.dof) for f in audit.findings if spans_blocks(f)}))
    return ModelTree(root, left_out, across)


def make_cells(audit: Audit) -> Iterable[tuple[str, Cell]]:
    dof: dict[str, dict[Verdict, int]] = defaultdict(lambda: defaultdict(int))
    codes: dict[str, dict[str, None]] = defaultdict(dict)
    for f in audit.findings:
        if spans_blocks(f):
            continue
        dof[f.parameter][f.verdict] += f.dof
        codes[f.parameter][f.code] = None
    why = {u.parameter: u.why for u in audit.unknown}
    known = dict(audit.shapes) or {f.parameter: (f.elements,) for f in audit.findings}
    verdicts: tuple[Verdict, ...] = ("dead", "folds", "gauge")
    for name, shape in known.items():
        marks = tuple((v, dof[name][v]) for v in verdicts if v in dof[name])
        leaf = name.rpartition(".")[2]
        yield name, Cell(leaf, name, tuple(shape), marks, tuple(codes[name]), why.get(name))


def build_box(name: str, cells: Sequence[tuple[list[str], Cell]]) -> Box:
    """A module from the cells below it, each with its path from here."""
    own = tuple(cell for path, cell in cells if len(path) == 1)
    below: dict[str, list[tuple[list[str], Cell]]] = defaultdict(list)
    for path, cell in cells:
        if len(path) > 1:
            below[path[0]].append((path[1:], cell))
    joined = join_equal([build_box(child, inside) for child, inside in below.items()])
    boxes = [b for box in joined for b in without_list(box)]
    if not own and len(boxes) == 1 and boxes[0].n_blocks == 1 and not boxes[0].blocks:
        return replace(boxes[0], name=f"{name}.{boxes[0].name}" if name else boxes[0].name)
    return Box(name, own, tuple(boxes))


def without_list(box: Box) -> list[Box]:
    """A list of blocks is not a box of its own: its blocks are drawn in its place, under its name."""
    if box.cells or box.blocks or not all(b.blocks for b in box.boxes):
        return [box]
    return [replace(b, path=f"{box.name}.{b.path}") for b in box.boxes]


def join_equal(boxes: list[Box]) -> list[Box]:
    """Numbered modules that look alike become one, in the place of the first."""
    alike: dict[object, list[Box]] = defaultdict(list)
    for box in boxes:
        head, _, tail = box.name.partition(".")
        key = (tail, look(box)) if head.isdecimal() else box.name
        alike[key].append(box)
    return [join(group) for group in alike.values()]


def join(group: list[Box]) -> Box:
    first = group[0]
    head, _, tail = first.name.partition(".")
    if not head.isdecimal():
        return first
    numbers = [int(box.name.partition(".")[0]) for box in group]
    joined = first if len(group) == 1 else with_stars(first, [filters_of(box) for box in group])
    return replace(joined, name=tail, blocks=ranges(numbers).replace("-", "–"), n_blocks=len(group))


def filters_of(box: Box) -> list[str]:
    """The full names of all parameters of a box, in order."""
    return [c.filter for c in box.cells] + [f for b in box.boxes for f in filters_of(b)]


def with_stars(box: Box, names: list[list[str]]) -> Box:
    """The same box; where the names of equal parameters differ, a * takes the place of the number."""
    merged = iter([star(column) for column in zip(*names, strict=True)])

    def renamed(box: Box) -> Box:
        cells = tuple(replace(c, filter=next(merged)) for c in box.cells)
        return replace(box, cells=cells, boxes=tuple(renamed(b) for b in box.boxes))

    return renamed(box)


def star(names: Sequence[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in parts)


def look(box: Box) -> object:
    """Everything that is drawn of a box, but its name and what to search for."""
    cells = tuple((c.name, c.shape, c.marks, c.codes, c.unknown) for c in box.cells)
    return cells, tuple((b.title, look(b)) for b in box.boxes)
