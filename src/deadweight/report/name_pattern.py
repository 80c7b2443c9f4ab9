"""Parameter names joined into patterns: `h.0.ln.bias`, `h.1.ln.bias` … become `h.0-11.ln.bias`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deadweight.audit.result import Pieces

# A number that counts repeated blocks: a whole path component (`h.0`), or the end of one named for it (`layer_0`).
_INDEX = re.compile(r"(?:(?<=\.)|^|(?<=layer_)|(?<=block_))(0|[1-9][0-9]{0,8})(?=\.|$)")

_MAX_PIECES = 3  # more start:stop pieces than this are abbreviated

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A name with holes, for all combinations of its block numbers and its leaves."""

    fixed: tuple[str, ...]  # the text around the holes; one longer than `holes`
    holes: tuple[tuple[int, ...], ...]  # the numbers that each hole takes
    leaves: tuple[str, ...]  # the last path components: `.weight`, `.bias`

    def __str__(self) -> str:
        filled = "".join(text + ranges(hole) for text, hole in zip(self.fixed, self.holes, strict=False))
        return filled + self.fixed[-1] + _braces(self.leaves)

    def __contains__(self, name: str) -> bool:
        fixed, indices, leaf = split(name)
        numbers = zip(indices, self.holes, strict=True)
        return fixed == self.fixed and leaf in self.leaves and all(i in hole for i, hole in numbers)


def split(name: str) -> tuple[tuple[str, ...], Indices, str]:
    """A name as its text, its block numbers and its leaf: `h.3.attn.bias` is `("h.", ".attn"), (3,), ".bias"`."""
    stem, dot, leaf = name.rpartition(".")
    if not dot or leaf.isdigit():
        stem, dot, leaf = name, "", ""
    parts = _INDEX.split(stem)
    return tuple(parts[::2]), tuple(int(i) for i in parts[1::2]), dot + leaf


def collapse(names: Iterable[str]) -> list[Pattern]:
    """Patterns for exactly these names, in the order in which the names first appear."""
    indices: dict[tuple[tuple[str, ...], str], set[Indices]] = defaultdict(set)
    for name in names:
        fixed, numbers, leaf = split(name)
        indices[fixed, leaf].add(numbers)
    leaves: dict[tuple[tuple[str, ...], frozenset[Indices]], list[str]] = defaultdict(list)
    for (fixed, leaf), numbers_seen in indices.items():
        leaves[fixed, frozenset(numbers_seen)].append(leaf)
    return [
        Pattern(fixed, holes, tuple(ends))
        for (fixed, numbers_seen), ends in leaves.items()
        for holes in _products(set(numbers_seen))
    ]


def collapse_with_names(names: Sequence[str]) -> list[tuple[Pattern, list[str]]]:
    """Patterns for these names, each with its own; a name is compared with the patterns of its text alone."""
    result: list[tuple[Pattern, list[str]]] = [(pattern, []) for pattern in collapse(names)]
    by_text: dict[tuple[tuple[str, ...], str], list[tuple[Pattern, list[str]]]] = defaultdict(list)
    for pattern, members in result:
        for leaf in pattern.leaves:
            by_text[pattern.fixed, leaf].append((pattern, members))
    for name in names:
        fixed, _, leaf = split(name)
        next(members for pattern, members in by_text[fixed, leaf] if name in pattern).append(name)
    return result


def ranges(values: Collection[int]) -> str:
    """`0-3,7` for {0, 1, 2, 3, 7}; `1-11:2` for every second one."""
    ordered = sorted(values)
    if len(ordered) > 3 and (step := _common_step(ordered)) > 1:
        return f"{ordered[0]}-{ordered[-1]}:{step}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(ordered))


def pieces_text(pieces: Pieces | None) -> str:
    """`[768:1536]`; the whole parameter is the empty text; many pieces are abbreviated, with their number."""
    if pieces is None:
        return ""
    shown = [f"{a}:{b}" for a, b in pieces]
    if len(shown) > _MAX_PIECES:
        shown = [*shown[:2], "…", f"{shown[-1]} in {len(shown)} pieces"]
    return f"[{', '.join(shown)}]"


def join_pieces(slices: Iterable[Pieces | None]) -> Pieces | None:
    """The union of several slices of one parameter; pieces that touch or overlap become one."""
    listed = list(slices)
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(piece for pieces in listed if pieces is not None for piece in pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return None if None in listed else tuple(joined)


def _braces(leaves: tuple[str, ...]) -> str:
    """`.weight` for one leaf, `.{weight,bias}` for several."""
    return leaves[0] if len(leaves) == 1 else ".{" + ",".join(leaf.lstrip(".") for leaf in leaves) + "}"


def _products(tuples: set[Indices]) -> list[tuple[tuple[int, ...], ...]]:
    """A set of index tuples as disjoint products: first numbers with the same set of rests are taken together."""
    if () in tuples:
        return [()]
    rests: dict[int, set[Indices]] = defaultdict(set)
    for first, *rest in tuples:
        rests[first].add(tuple(rest))
    firsts: dict[frozenset[Indices], list[int]] = defaultdict(list)
    for first in sorted(rests):
        firsts[frozenset(rests[first])].append(first)
    return [(tuple(group), *holes) for rest, group in firsts.items() for holes in _products(set(rest))]


def _common_step(ordered: list[int]) -> int:
    steps = {b - a for a, b in pairwise(ordered)}
    return steps.pop() if len(steps) == 1 else 0


def _runs(ordered: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for value in ordered:
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs
