"""Redundancy by layer: one bar for every repeated block, by verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from deadweight.audit.result import Finding
from deadweight.report.name_pattern import split

OUTSIDE = ("", -1)
MOST_BARS = 200  # blocks of one list that get a bar each


@dataclass(frozen=True)
class Bar:
    block: int
    dof: int
    share: float  # of the longest bar of its row, 0 to 1


@dataclass(frozen=True)
class BarRow:
    """One verdict over all blocks."""

    verdict: str
    bars: tuple[Bar, ...]
    longest: int
    total: int


@dataclass(frozen=True)
class Stack:
    """One list of repeated blocks, `transformer.h` say."""

    path: str
    n_blocks: int
    rows: tuple[BarRow, ...]


@dataclass(frozen=True)
class Layers:
    stacks: tuple[Stack, ...]
    outside: int  # dof of parameters in no repeated block, and of findings that span several


def by_layer(amounts: Iterable[tuple[str, str, int]], names: Iterable[str]) -> Layers:
    """`amounts` are parameter, verdict and dof; `names` are all parameters, for the number of blocks."""
    sizes: dict[str, int] = defaultdict(int)
    for name in names:
        path, block = block_of(name)
        sizes[path] = max(sizes[path], block + 1)
    dof: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    outside = 0
    for name, verdict, n in amounts:
        path, block = block_of(name)
        if 1 < sizes[path] <= MOST_BARS:
            dof[path][verdict][block] += n
        else:
            outside += n
    return Layers(tuple(make_stack(path, sizes[path], by) for path, by in dof.items()), outside)


def spans_blocks(f: Finding) -> bool:
    """Whether a finding is about the whole residual stream: its parameters lie in more than two blocks of a list."""
    return len({block_of(name) for name in (f.parameter, *f.into)} - {OUTSIDE}) > 2


def block_of(name: str) -> tuple[str, int]:
    """The list that a parameter's outermost block is in, and its number there; −1 outside."""
    fixed, numbers, _ = split(name)
    return (fixed[0].rstrip("._"), numbers[0]) if numbers else OUTSIDE


def make_stack(path: str, n_blocks: int, by_verdict: dict[str, dict[int, int]]) -> Stack:
    rows = []
    for verdict in sorted(by_verdict):
        by_block = by_verdict[verdict]
        longest = max(by_block.values())
        bars = tuple(Bar(i, by_block.get(i, 0), by_block.get(i, 0) / max(1, longest)) for i in range(n_blocks))
        rows.append(BarRow(verdict, bars, longest, sum(by_block.values())))
    return Stack(path, n_blocks, tuple(rows))
