"""A tensor that is filled slice by slice, all of it, is a concatenation; one that is filled index by index, a stack."""

from __future__ import annotations

from deadweight.graph.node import Argument, Node, Ref
from deadweight.graph.operations import CAT, STACK
from deadweight.graph.rewriting import Canonicaliser, argument, rewrites


@rewrites("aten.slice_scatter")
def join_slices(make: Canonicaliser, node: Node) -> Ref | None:
    """Slices along one axis that cover it without gaps; none may overwrite another."""
    axis, written = axis_of(node), dict[int, tuple[int, Ref]]()
    current: Node = node
    while current.op == "aten.slice_scatter" and axis_of(current) == axis:
        places = interval(current, axis)
        if places is None or places[0] in written:
            return None
        start, stop = places
        written[start] = (stop, current.args[1])
        current = make.nodes[current.args[0].name]
        if covers(written, node.shape[axis]):
            break
    if not covers(written, node.shape[axis]):
        return None
    parts = [written[start][1] for start in sorted(written)]
    if any(
        make.shape(p)[:axis] + make.shape(p)[axis + 1 :] != node.shape[:axis] + node.shape[axis + 1 :] for p in parts
    ):
        return None  # what is written was broadcast to its slice
    args: tuple[Argument, ...] = (parts, axis)
    return make.emit(f"{node.name}_joined", CAT, args, node.shape, node)


@rewrites("aten.select_scatter")
def stack_selected(make: Canonicaliser, node: Node) -> Ref | None:
    """What is written at every index of one axis, as a loop over time does; of two writes at one index the last counts.

    Whatever the tensor held before is overwritten everywhere, so it does not matter.
    """
    axis, written = axis_of(node), dict[int, Ref]()
    current: Node = node
    while current.op == "aten.select_scatter" and axis_of(current) == axis:
        written.setdefault(int(argument(current, 3, "index")) % node.shape[axis], current.args[1])
        current = make.nodes[current.args[0].name]
    parts = [written[index] for index in sorted(written)]
    if len(parts) < node.shape[axis] or not all(same_numbers(make.nodes[part.name], node) for part in parts):
        return None
    args: tuple[Argument, ...] = (parts, axis)
    return make.emit(f"{node.name}_stacked", STACK, args, node.shape, node)


def same_numbers(part: Node, node: Node) -> bool:
    """Whether writing keeps the numbers: the tensor that is filled has their type, or another float type."""
    return part.dtype == node.dtype or (part.is_float and node.is_float)


def axis_of(node: Node) -> int:
    return int(argument(node, 2, "dim", 0)) % len(node.shape)


def interval(node: Node, axis: int) -> tuple[int, int] | None:
    """The start and the stop of the slice that is written; None for a slice with a step, or an empty one."""
    size = node.shape[axis]
    start, stop = argument(node, 3, "start"), argument(node, 4, "end")
    if argument(node, 5, "step", 1) != 1 or not all(x is None or type(x) is int for x in (start, stop)):
        return None
    first, last, _ = slice(start, stop).indices(size)
    return (first, last) if first < last else None


def covers(written: dict[int, tuple[int, Ref]], size: int) -> bool:
    """Whether these intervals follow each other from 0 to `size`."""
    place = 0
    for start in sorted(written):
        if start != place:
            return False
        place = written[start][0]
    return place == size
