"""Spaces: the vectors that a set of parameters writes and others read, found by following writers to readers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof import basis_rules as _rules  # noqa: F401  (registers the rules)
from deadweight.proof.basis import NeedsWriters, Site, Turned, TurnWalk, WalkOptions
from deadweight.proof.operation_groups import CONVOLUTIONS, SHAPE
from deadweight.proof.readers import KEEPS_LAST_AXIS, peel, skip_shape
from deadweight.proof.steps import Blocked, Step
from deadweight.proof.weights import numbered, uses_of, weight_view
from deadweight.search.prover import Prover, split_by_readers


@dataclass
class Writers:
    """Nodes whose value lies in the space, with their coordinates; and the parameters that move for it."""

    nodes: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    expert: str | None = None  # how rows find their expert, where each has a space of its own
    steps: list[Step] = field(default_factory=list)  # where a tied table is read as a weight, and what undoes its scale
    behind: dict[str, Step] = field(default_factory=dict)  # what stands between a writer and the gain behind it

    def add(self, node: str, coordinate: Tensor, *sites: Site) -> None:
        if node not in self.nodes:
            self.nodes[node] = coordinate
            self.sites.extend(s for s in sites if not any(same(s, t) for t in self.sites))


def same(a: Site, b: Site) -> bool:
    return (
        a.parameter == b.parameter and a.role == b.role and a.axis == b.axis and torch.equal(a.coordinate, b.coordinate)
    )


def explore(
    prover: Prover, writers: Writers, size: int, *, scalar: bool = False, powers: bool = False, gains: bool = True
) -> Turned:
    """Turn the space these writers write, bringing in every other writer that its vectors are added to.

    `powers` and `gains` are those of `WalkOptions`.
    """
    options = WalkOptions(scalar=scalar, powers=powers, gains=gains)
    walk = partial(TurnWalk, prover.identity, size=size, options=options)
    for _ in range(400):
        turned = walk(writers=writers.nodes, sites=writers.sites, expert=writers.expert).run()
        if writers.expert is not None and not turned.proved:  # perhaps a space that all experts share
            writers.expert, writers.sites = None, [replace(s, expert=None) for s in writers.sites]
            continue
        if not isinstance(turned.blocked, NeedsWriters):
            break
        try:
            before = len(writers.nodes)
            for other in turned.blocked.missing:
                bring_in(prover.graph, writers, other, size, scalar=scalar)
        except Blocked as blocked:
            turned.blocked = blocked.with_traceback(None)
            break
        if len(writers.nodes) == before:
            turned.blocked = Blocked(turned.blocked.node, turned.blocked.op, turned.blocked.why)
            break
    if turned.proved:
        beside = {step.node for step in writers.steps}
        turned.blocked = shared_elsewhere(prover.graph, turned, beside | set(writers.nodes) | set(writers.behind))
        turned.blocked = turned.blocked or moved_gain(prover, turned)
        if met := beside & (turned.touched | set(writers.nodes)):
            turned.blocked = Blocked(min(met), "parameter", "a tied table scales it, and what it reads as well")
        between = {name for name, step in writers.behind.items() if step.op != "linear"}  # a linear map may read it too
        if met := between & turned.touched:
            turned.blocked = Blocked(min(met), "parameter", "it turns behind a gain, and without it as well")
        turned.steps.extend(writers.steps)
        turned.steps[:0] = writers.behind.values()
    return turned


def shared_elsewhere(graph: Graph, turned: Turned, writers: set[str]) -> Blocked | None:
    """A parameter that writes the space may be used for nothing else."""
    for site in turned.sites:
        if site.role in ("out", "behind"):
            strangers = [n for n in uses_of(graph, site.parameter) if n not in writers and n not in turned.touched]
            if strangers:
                return Blocked(site.parameter, "parameter", f"{strangers[0]} reads it too (tied or shared)")
    return None


def moved_gain(prover: Prover, turned: Turned) -> Blocked | None:
    """A gain with writers behind it may not turn itself."""
    moved = {site.parameter for site in turned.sites}
    for site in turned.sites:
        if site.role == "behind" and site.gain is not None:
            for name in moved:
                if prover.made_of[site.gain] & prover.made_of[name]:
                    return Blocked(name, "parameter", "it is a gain, and turns itself")
    return None


def bring_in(graph: Graph, writers: Writers, name: str, size: int, *, scalar: bool) -> None:
    """Add whatever writes this node's value to the writers of the space."""
    node = graph.nodes[name]
    view = weight_view(graph, node)
    if view is not None:
        add_linear(graph, writers, node, size, scalar=scalar)
    elif node.op == "aten.embedding":
        add_table(graph, writers, node, scalar=scalar)
    elif node.op == "parameter":
        if not node.is_float:
            raise Blocked(name, node.op, "whole numbers are added, which do not turn")
        if not node.shape or (not scalar and node.shape[-1] != size):
            raise Blocked(name, node.op, "it is added alike to several coordinates")
        coordinate = whole(node.shape[-1], scalar=scalar)
        writers.add(name, coordinate, Site(name, "out", len(node.shape) - 1, coordinate))
    elif node.op in ("aten.mul", "aten.div"):
        bring_in_product(graph, writers, node, size, scalar=scalar)
    elif node.op in PASSED_BACK or node.op in SHAPE:
        summed = dict.fromkeys(node.inputs)
        for other in [n for n in summed if not is_bias(graph, n, node)] or summed:
            bring_in(graph, writers, other, size, scalar=scalar)
    else:
        raise Blocked(name, node.op, "this operation writes to the same sum, and cannot turn along")


PASSED_BACK = {"aten.add", "aten.sub", "aten.sum", "aten.mean", "core.layer", "core.rms", "core.unit", "aten.dropout"}


def is_bias(graph: Graph, name: str, node: Node) -> bool:
    """An added parameter vector turns along by itself when the walk meets it."""
    operand = graph.nodes[name]
    while operand.op in ("aten.reshape", "aten.unsqueeze") and isinstance(operand.args[0], Ref):
        operand = graph.node(operand.args[0])
    return node.op in ("aten.add", "aten.sub") and operand.op == "parameter" and name not in graph.outputs


def whole(size: int, *, scalar: bool) -> Tensor:
    return torch.ones(size, dtype=torch.int64) if scalar else numbered(size)


def add_linear(graph: Graph, writers: Writers, node: Node, size: int, *, scalar: bool) -> None:
    """A linear map, at every place where its weight is used."""
    view = weight_view(graph, node)
    assert view is not None
    width = graph.nodes[view.parameter].shape[view.output]
    if not scalar and width != size:
        raise Blocked(node.name, node.op, "it writes a space of another width")
    coordinate = whole(width, scalar=scalar)
    site = Site(view.parameter, "out", view.output, coordinate)
    for use in list(uses_of(graph, view.parameter)):
        used = graph.nodes[use]
        other = weight_view(graph, used)
        if other != view or used.args[0] == node.args[1]:
            raise Blocked(use, used.op, f"{view.parameter} is used in another way too (tied)")
        writers.add(use, placed(used, coordinate), site)


def placed(node: Node, coordinate: Tensor) -> Tensor:
    """Coordinates along the axis on which a linear map or convolution writes its outputs."""
    return coordinate.reshape(1, -1, *[1] * (len(node.shape) - 2)) if node.op in CONVOLUTIONS else coordinate


def add_table(graph: Graph, writers: Writers, node: Node, *, scalar: bool) -> None:
    table = graph.node(node.args[0])
    if table.op != "parameter" or not table.is_float:
        raise Blocked(node.name, node.op, "the table is not a parameter, or holds whole numbers")
    coordinate = whole(node.shape[-1], scalar=scalar)
    for use in uses_of(graph, table.name):
        if graph.nodes[use].op != "aten.embedding" and scalar:
            sites, steps = undone_before(graph, graph.nodes[use], table.name)
            writers.sites.extend(s for s in sites if not any(same(s, t) for t in writers.sites))
            writers.steps.extend(step for step in steps if step not in writers.steps)
            continue
        if graph.nodes[use].op != "aten.embedding":
            raise Blocked(use, graph.nodes[use].op, f"{table.name} is read as a weight too (tied)")
        writers.add(use, coordinate, Site(table.name, "out", 1, coordinate))


def undone_before(graph: Graph, node: Node, table: str) -> tuple[list[Site], list[Step]]:
    """A linear map whose weight is a scaled table reads γ·x̂ + β: with γ and β over s its result stays what it was.

    (s·E)·(γ/s·x̂ + β/s) = E·(γ·x̂ + β). Needs γ and β that nothing else reads, and a sum that this map alone reads.
    """
    tied = Blocked(node.name, node.op, f"{table} is read as a weight too (tied)")
    view = weight_view(graph, node)
    if node.op != "linear" or view is None or view.parameter != table:
        raise tied
    sites, steps = [], [Step(node.name, node.op, "the weight is scaled, and what it reads over as much", "undone")]
    current = graph.node(node.args[0])
    for _ in range(9):
        if len(graph.users[current.name]) != 1 or current.name in graph.outputs:
            raise tied
        steps.append(Step(current.name, current.op, "scaled against the table", "scaled", True))
        before, shift = peel(graph, current.name, "aten.add")
        inner, gain = peel(graph, current.name, "aten.mul")
        if shift is not None:
            bias = graph.nodes[shift]
            if bias.op != "parameter" or len(graph.users[shift]) != 1:
                raise tied
            sites.append(Site(shift, "in", len(bias.shape) - 1, torch.ones(bias.shape[-1], dtype=torch.int64)))
            current = graph.nodes[before]
        elif gain is not None and graph.nodes[skip_shape(graph, inner)].op.startswith("core."):
            site = gain_site(graph, gain, torch.ones(current.shape[-1], dtype=torch.int64))
            return [*sites, replace(site, role="in")], steps[::-1]
        elif len(current.inputs) == 1 and (current.op in KEEPS_LAST_AXIS or is_multiple(current)):
            current = graph.nodes[current.inputs[0]]
        else:
            raise tied
    raise tied


def is_multiple(node: Node) -> bool:
    """A constant number times a value."""
    return node.op in ("aten.mul", "aten.div") and isinstance(node.args[0], Ref) and not node.kwargs


def bring_in_product(graph: Graph, writers: Writers, node: Node, size: int, *, scalar: bool) -> None:
    """A number or a per-channel parameter times something that writes the space."""
    if not isinstance(node.args[1], Ref):
        bring_in(graph, writers, node.args[0].name, size, scalar=scalar)
        return
    inner, gain = peel(graph, node.name, "aten.mul")
    vectors = [a for a in node.args if graph.node(a).shape[-1:] == node.shape[-1:]]
    if gain is None and len(vectors) == 1 and node.shape[-1] > 1:  # times a number of each vector
        bring_in(graph, writers, vectors[0].name, size, scalar=scalar)
        return
    if gain is None:
        raise Blocked(node.name, node.op, "a product of two data-dependent values writes to the same sum")
    coordinate = whole(node.shape[-1], scalar=scalar)
    if graph.nodes[skip_shape(graph, inner)].op.startswith("core."):
        products = gained(graph, gain)
        site = gain_site(graph, gain, coordinate, n_uses=len(products))
        for use in products:
            writers.add(use, coordinate, site)
        return
    behind = Writers()
    way, vectors_behind = way_behind(graph, inner)
    bring_in(graph, behind, way[0], size, scalar=scalar)
    biases = [Site(b, "behind", 0, coordinate, None, gain) for b in vectors_behind]
    if len(behind.nodes) != 1:
        raise Blocked(node.name, node.op, "several writers stand behind one gain")
    sites = [replace(s, role="behind", gain=gain) for s in behind.sites]
    writers.add(node.name, coordinate, *sites, *biases)
    for name in way:
        writers.behind[name] = Step(
            name, graph.nodes[name].op, "diag(1/γ)·X·diag(γ) here is X behind γ", "turned", True
        )


def way_behind(graph: Graph, inner: str) -> tuple[list[str], list[str]]:
    """The linear map or table whose values a gain multiplies, with all that follows up to the gain; and the biases.

    A gain of its own channel is undone only if no channel changes its place, nothing but these vectors is added, and
    nothing else reads what stands before the gain.
    """
    way, biases = [inner], list[str]()
    while graph.nodes[way[0]].op not in ("linear", "aten.embedding"):
        node = graph.nodes[way[0]]
        found = [graph.node(a) for a in node.args if isinstance(a, Ref)]
        vectors = [n.name for n in found if is_own_bias(graph, n, node)] if node.op == "aten.add" else []
        if len(found) == 2 and len(vectors) == 1 and not node.kwargs:
            biases += vectors
            way.insert(0, next(n.name for n in found if n.name not in vectors))
        elif skip_shape(graph, node.name) != node.name:
            way.insert(0, node.inputs[0])
        else:
            raise Blocked(node.name, node.op, "it stands behind a gain, and is neither a linear map nor a table")
    for name in way:
        if len(graph.users[name]) != 1:
            raise Blocked(name, graph.nodes[name].op, "it is read without the gain too")
    return way, biases


def is_own_bias(graph: Graph, vector: Node, node: Node) -> bool:
    """A parameter of one number for each channel that only this sum reads."""
    return vector.op == "parameter" and vector.shape == node.shape[-1:] and len(graph.users[vector.name]) == 1


def gained(graph: Graph, gain: str) -> list[str]:
    """Every norm that a gain multiplies: several, in a layer that is used several times."""
    result = []
    for reader in graph.users[gain]:
        inner, factor = peel(graph, reader.name, "aten.mul")
        if factor != gain or not graph.nodes[skip_shape(graph, inner)].op.startswith("core."):
            raise Blocked(reader.name, reader.op, "the gain is read elsewhere too (shared)")
        result.append(reader.name)
    return result


def gain_site(graph: Graph, gain: str, coordinate: Tensor, n_uses: int = 1) -> Site:
    """γ itself, or 1 + w: either way one parameter whose motion scales the gain, in so many products."""
    node = graph.nodes[gain]
    while node.op != "parameter":
        refs = [graph.node(a) for a in node.args if isinstance(a, Ref)]
        plain = node.op in ("aten.add", "aten.reshape", "aten.unsqueeze", "aten.expand") and len(refs) == 1
        if not plain or node.kwargs or len(graph.users[node.name]) != (n_uses if node.name == gain else 1):
            raise Blocked(gain, node.op, "the gain is not one parameter")
        node = refs[0]
    if len(graph.users[node.name]) != (n_uses if node.name == gain else 1):
        raise Blocked(node.name, "parameter", "the gain is read elsewhere too (shared)")
    if torch.Size(node.shape).numel() != len(coordinate):
        raise Blocked(node.name, "parameter", "one number of the gain multiplies several channels")
    return Site(node.name, "gain", 0, coordinate, value=gain)


def output_parts(graph: Graph, node: Node, width: int) -> list[Tensor]:
    """The outputs of a linear map, split by who computes with them first: a fused weight falls apart."""
    return split_by_readers(graph, node, numbered_outputs(node, width))


def numbered_outputs(node: Node, width: int) -> Tensor:
    """The number of its output at every element of a linear map's or convolution's value."""
    axis = 1 if node.op in CONVOLUTIONS else len(node.shape) - 1
    shape = [width if a == axis else 1 for a in range(len(node.shape))]
    return numbered(width).reshape(shape).expand(node.shape)
