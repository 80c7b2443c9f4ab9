"""DW009 query-key basis: only the product of queries and keys counts, so both may be turned against each other.

What stands between projection and product (nothing, rotary positions of any layout, or a part of them) decides which
turns are free. Behind a query-key norm with gains only these meet: of each pair the product counts. A norm without
gains leaves the turns that keep the length of a head: the angle of every rotary pair, or a rotation of the whole head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Node, Ref
from deadweight.laws.action import Blockwise, Element, direction, transformed
from deadweight.laws.claim import Claim, normal
from deadweight.laws.head_parts import HeadPart, by_shape, turn_of
from deadweight.laws.normed_heads import directions, keeping_lengths
from deadweight.laws.point import Motion, Point, Values
from deadweight.laws.prover import Prover
from deadweight.laws.spaces import gain_site, placed
from deadweight.laws.turn_claim import SIZE
from deadweight.laws.turns import moved_index
from deadweight.proof import turn_rules as _rules  # noqa: F401  (registers the rules)
from deadweight.proof.commutant import Part, Products, commutant, head_products, merged
from deadweight.proof.normed import grams
from deadweight.proof.opsets import SHAPE
from deadweight.proof.reading import peel, skip_shape
from deadweight.proof.steps import Blocked
from deadweight.proof.turn import Site, Turned, TurnWalk
from deadweight.proof.weights import numbered, uses_of, weight_view

CODE, NAME = "DW009", "query-key-basis"
THROUGH = SHAPE | {
    "core.rms",
    "core.unit",
    "aten.add",
    "aten.sub",
    "aten.mul",
    "aten.div",
    "aten.neg",
    "aten.where",
    "aten.masked_fill",
}


@dataclass(frozen=True, kw_only=True)
class ContractionClaim(Claim):
    """Queries and keys turn against each other."""

    sites: tuple[Site, ...]
    products: tuple[Products, ...]
    diagonal: bool
    parts: tuple[HeadPart, ...] = ()

    def motions(self, point: Point) -> Iterator[Motion]:
        for element in self.basis():
            yield direction(self.sites, element, point.values, point.value)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        scales = [normal(generator) for _ in gain_pairs(self.products)] if self.diagonal else []
        element = gain_scales(self.products, scales) if self.diagonal else self.random(generator, finite=False)
        return direction(self.sites, element, point.values, point.value)

    def member(self, point: Point, generator: torch.Generator) -> Values:
        scales = [torch.rand((), generator=generator, dtype=torch.float64) for _ in gain_pairs(self.products)]
        element = gain_scales(self.products, scales, finite=True) if self.diagonal else self.random(generator, True)
        return transformed(self.sites, element, point.values, point.value)

    def basis(self) -> Iterator[Element]:
        """A basis of the Lie algebra, one direction after the other."""
        if self.diagonal:
            pairs = gain_pairs(self.products)
            for i in range(len(pairs)):
                yield gain_scales(self.products, list(torch.eye(len(pairs), dtype=torch.float64)[i]))
            return
        for part in self.parts:
            for unit in directions(part):
                yield turn_of([part], unit[None], finite=False)

    def random(self, generator: torch.Generator, finite: bool) -> Element:
        """A random direction, or a random member of the group not too far from 1."""
        found: list[Blockwise] = []
        for alike in by_shape(self.parts):
            size = SIZE / (alike[0].part.count * alike[0].part.entry) ** 0.5 / 2
            drawn = torch.stack([part.random(generator) for part in alike]) * size
            found += turn_of(alike, drawn, finite=finite)
        return tuple(found)


def gain_scales(products: tuple[Products, ...], scales: list[Tensor], *, finite: bool = False) -> Element:
    """One scale for each pair of gains that meet: up on the queries' side, down on the keys'."""
    found = []
    for (left, right), s in zip(gain_pairs(products), scales, strict=True):
        for side, change in ((left, s), (right, 1 / (1 + s) - 1 if finite else -s)):
            index = torch.tensor(side)[:, None]
            found.append(Blockwise.dense(index, change.expand(len(side), 1, 1)))
    return tuple(found)


@dataclass(frozen=True)
class Root:
    """Where one side of the product begins: a projection, or the gain behind a norm."""

    node: Node
    width: int
    is_gain: bool
    gain: str | None = None


def find(prover: Prover) -> Iterator[Claim]:
    met: set[str] = set()  # products that an earlier claim speaks of
    known: Known = []
    for node in prover.graph.nodes.values():
        if node.op == "aten.matmul" and all(isinstance(a, Ref) for a in node.args) and node.name not in met:
            roots = [root_of(prover.graph, ref.name) for ref in node.args]
            if roots[0] is not None and roots[1] is not None and roots[0].is_gain == roots[1].is_gain:
                for claim in contraction(prover, node, roots[0], roots[1], known):
                    met |= {step.node for step in claim.steps if step.op == "aten.matmul"}
                    yield claim


def root_of(graph: Graph, name: str) -> Root | None:
    """The one projection (or norm gain) that a value is a linear image of."""
    found: dict[str, Root] = {}
    stack, seen = [name], set[str]()
    while stack:
        node = graph.nodes[stack.pop()]
        if node.name in seen or not graph.depends[node.name][1] or not any(graph.depends[node.name]):
            continue
        seen.add(node.name)
        root = as_root(graph, node)
        if root is not None:
            found[node.name] = root
        elif node.op in THROUGH:
            stack.extend(node.inputs)
        else:
            return None
    return next(iter(found.values())) if len(found) == 1 else None


def as_root(graph: Graph, node: Node) -> Root | None:
    view = weight_view(graph, node)
    if view is not None:
        return Root(node, graph.nodes[view.parameter].shape[view.output], is_gain=False)
    inner, gain = peel(graph, node.name, "aten.mul")
    if gain is not None and graph.nodes[skip_shape(graph, inner)].op.startswith("core."):
        return Root(node, node.shape[-1], is_gain=True, gain=gain)
    return None


def contraction(prover: Prover, node: Node, query: Root, key: Root, known: Known) -> Iterator[Claim]:
    """Turn both sides at once; everything they touch must be this product."""
    size = query.width + key.width
    coordinates = {}
    for root, ref, offset in ((query, node.args[0], 0), (key, node.args[1], query.width)):
        coordinates[offset] = reaching(prover, root, ref.name, offset)
    writers: dict[str, Tensor] = {}
    sites: list[Site] = []
    try:
        for root, offset in ((query, 0), (key, query.width)):
            add_root(prover.graph, root, coordinates[offset], writers, sites)
    except Blocked:
        return
    turned = TurnWalk(prover.graph, prover.identity, writers, sites, size, contracts=True).run()
    only = turned.proved and bool(turned.contractions) and not turned.rotations and not (query.is_gain and turned.norms)
    if only and not bool(turned.blocks.any()) and not any(s.role == "in" for s in turned.sites):
        yield from conclude(query, turned, sites, coordinates[query.width], known)


def reaching(prover: Prover, root: Root, operand: str, offset: int) -> Tensor:
    """The coordinates of a root that reach this operand of the product."""
    numbers = numbered(root.width, offset)
    within = between(prover.graph, root.node.name, operand)
    start = {root.node.name: placed(root.node, numbers)}
    walk = TurnWalk(prover.graph, prover.identity, start, [], offset + root.width, within=within, contracts=True)
    walk.run()
    form = walk.forms.get(operand)
    if form is None:
        return torch.zeros_like(numbers)
    present = torch.cat([s.coordinate.reshape(-1) for s in form.slots]).unique()
    return torch.where(torch.isin(numbers, present), numbers, 0)


def between(graph: Graph, start: str, end: str) -> set[str]:
    """The nodes on the way from one node to another."""
    back, stack = set[str](), [end]
    while stack:
        name = stack.pop()
        if name not in back:
            back.add(name)
            if name != start:
                stack.extend(graph.nodes[name].inputs)
    return back


def add_root(graph: Graph, root: Root, coordinate: Tensor, writers: dict[str, Tensor], sites: list[Site]) -> None:
    if not bool((coordinate != 0).any()):
        raise Blocked(root.node.name, root.node.op, "nothing of it reaches the product")
    if root.is_gain:
        assert root.gain is not None
        sites.append(gain_site(graph, root.gain, coordinate))
        writers[root.node.name] = coordinate
        return
    view = weight_view(graph, root.node)
    assert view is not None
    for use in uses_of(graph, view.parameter):
        if weight_view(graph, graph.nodes[use]) != view:
            raise Blocked(use, graph.nodes[use].op, "tied")
        before, along = writers.get(use), placed(graph.nodes[use], coordinate)
        if before is not None and bool(((before != 0) & (along != 0)).any()):
            raise Blocked(use, graph.nodes[use].op, "queries and keys are the same numbers")
        writers[use] = along if before is None else before + along
    sites.append(Site(view.parameter, "out", view.output, coordinate))


def conclude(query: Root, turned: Turned, sites: list[Site], coordinate: Tensor, known: Known) -> Iterator[Claim]:
    products = one_way([p for c in turned.contractions for p in head_products(c.left, c.right)], query.width)
    parts = [] if query.is_gain else head_parts(products, known)
    parts = keeping_lengths(parts, [gram for form in turned.norms for gram in grams(form)])
    dof = len(gain_pairs(tuple(products))) if query.is_gain else sum(p.dimension for p in parts)
    if not dof:
        return
    own = next(s for s in sites if torch.equal(s.coordinate, coordinate))
    every = tuple(turned.sites)
    yield ContractionClaim(
        code=CODE,
        name=NAME,
        node=own.parameter,
        dof=dof,
        verdict="gauge",
        into=tuple(dict.fromkeys(s.parameter for s in every if s is not own)),
        index=moved_index(own),
        axis=own.axis,
        steps=tuple(turned.steps),
        note="of the two gains only the product counts" if query.is_gain else "",
        sites=every,
        products=tuple(products),
        diagonal=query.is_gain,
        parts=tuple(parts),
    )


def one_way(products: list[Products], width: int) -> list[Products]:
    """Queries left, keys right, one entry per pair of heads. Empty if a side is multiplied with itself."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Products]] = {}
    for p in products:
        if bool((p.left > width).all()) and bool((p.right <= width).all()):
            p = p.flipped()
        if bool((p.left > width).any()) or bool((p.right <= width).any()):
            return []
        found.setdefault((tuple(p.left.tolist()), tuple(p.right.tolist())), []).append(p)
    return [merged(same) for same in found.values()]


Known = list[tuple[Products, list[Part]]]  # groups that were computed before: layers are often alike


def head_parts(products: list[Products], known: Known) -> list[HeadPart]:
    """The group over all heads, part by part; heads that share keys share one group. Empty if it is not known."""
    found: list[HeadPart] = []
    for number, shared in enumerate(by_keys(products)):
        first = shared[0]
        parts = next((parts for before, parts in known if before.like(first)), None)
        if parts is None:
            parts = commutant(first) or []
            known.append((first, parts))
        if not parts or not all(p.like(first) for p in shared):
            return []
        for part in parts:
            queries = torch.stack([p.left[part.left] for p in shared])
            found.append(HeadPart(number, part, queries, first.right[part.right]))
    return found


def by_keys(products: list[Products]) -> list[list[Products]]:
    groups: dict[tuple[int, ...], list[Products]] = {}
    for p in products:
        groups.setdefault(tuple(p.right.tolist()), []).append(p)
    return list(groups.values())


def gain_pairs(products: tuple[Products, ...]) -> list[tuple[list[int], list[int]]]:
    """Gains that any product links belong together: one scale each, up on one side and down on the other."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def top(x: tuple[str, int]) -> tuple[str, int]:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x]
        return x

    for p in products:
        for a, b in p.entries.tolist():
            parent[top(("left", int(p.left[a])))] = top(("right", int(p.right[b])))
    groups: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for side, coordinate in list(parent):
        groups.setdefault(top((side, coordinate)), ([], []))[0 if side == "left" else 1].append(coordinate)
    return list(groups.values())
