"""A tensor that is filled slice by slice, until nothing is left of what it was, is a concatenation."""

from __future__ import annotations

from typing import Any

import torch

from deadweight.graph.node import Node, Ref
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites


@rewrites("aten.slice_scatter")
def join_slices(make: Canonicaliser, node: Node) -> Ref | None:
    """Slices along one axis that meet without a gap and cover all of it; a later one may not write over another."""
    axis, written = axis_of(node), dict[int, tuple[int, Ref]]()
    current: Node = node
    while current.op == "aten.slice_scatter" and axis_of(current) == axis:
        found = interval(current, axis)
        if found is None or found[0] in written:
            return None
        written[found[0]] = (found[1], current.args[1])
        current = make.nodes[current.args[0].name]
        if covers(written, node.shape[axis]):
            break
    if not covers(written, node.shape[axis]):
        return None
    parts = [written[start][1] for start in sorted(written)]
    if any(
        make.shape(p)[:axis] + make.shape(p)[axis + 1 :] != node.shape[:axis] + node.shape[axis + 1 :] for p in parts
    ):
        return None  # a slice that was filled by repeating what is written
    args: tuple[Any, ...] = (parts, axis)
    return make.emit(f"{node.name}_joined", "aten.cat", torch.ops.aten.cat.default, args, node.shape, node)


def axis_of(node: Node) -> int:
    return int(argument(node, 2, "dim", 0)) % len(node.shape)


def interval(node: Node, axis: int) -> tuple[int, int] | None:
    """The first place that is written and the first that is not; None where places are left out."""
    size = node.shape[axis]
    start, stop = argument(node, 3, "start"), argument(node, 4, "end")
    if argument(node, 5, "step", 1) != 1 or not all(x is None or type(x) is int for x in (start, stop)):
        return None
    first, last, _ = slice(start, stop).indices(size)
    return (first, last) if first < last else None


def covers(written: dict[int, tuple[int, Ref]], size: int) -> bool:
    """Whether these intervals follow each other from 0 to the end."""
    place = 0
    for start in sorted(written):
        if start != place:
            return False
        place = written[start][0]
    return place == size
