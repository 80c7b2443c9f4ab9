"""DW009 query-key basis: only the product of queries and keys counts, so both may be turned against each other.

What stands between projection and product (nothing, rotary positions of any layout, or a part of them) decides which
turns are free. Behind a query-key norm with gains only these meet: of each pair the product counts. A norm without
gains leaves the turns that keep the length of a head: the angle of every rotary pair, or a rotation of the whole head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title
from deadweight.claims.contraction_claim import ContractionClaim, gain_pairs
from deadweight.claims.head_parts import HeadPart
from deadweight.claims.normed_heads import keeping_lengths
from deadweight.graph.node import Graph, Node, Ref
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof import basis_rules as _rules  # noqa: F401  (registers the rules)
from deadweight.proof.basis import Site, Turned, TurnWalk, WalkOptions
from deadweight.proof.commutant import Part, Products, commutant, head_products, merged
from deadweight.proof.normed_heads import grams
from deadweight.proof.operation_groups import SHAPE
from deadweight.proof.readers import peel, skip_shape
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import numbered, uses_of, weight_view
from deadweight.rewrite.bases import BasisRewrite, places_of, worthwhile
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.save.facts import Fact
from deadweight.search.prover import Prover
from deadweight.search.spaces import gain_site, placed
from deadweight.search.turns import moved_index

TITLE = Title("DW009", "query-key-basis")
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


@dataclass(frozen=True)
class Root:
    """Where one side of the product begins: a projection, or the gain behind a norm."""

    node: Node
    width: int
    is_gain: bool
    gain: str | None = None


def find(prover: Prover) -> Iterator[Claim]:
    met: set[str] = set()  # products that an earlier claim speaks of
    known: KnownGroups = []
    roots = roots_of(prover.graph)
    for node in prover.graph.nodes.values():
        if node.op == "aten.matmul" and all(isinstance(a, Ref) for a in node.args) and node.name not in met:
            queries, keys = (in_order(prover.graph, roots[ref.name]) for ref in node.args)
            gains = {root.is_gain for root in (*queries, *keys)}
            if queries and keys and (gains == {False} or (gains == {True} and len(queries) == len(keys) == 1)):
                further = partners(prover.graph, node, roots, queries, keys)
                for claim in contraction(prover, node, queries, keys, known, further):
                    met |= {step.node for step in claim.steps if step.op == "aten.matmul"}
                    yield claim


def in_order(graph: Graph, roots: Roots) -> tuple[Root, ...]:
    return tuple(roots[name] for name in sorted(roots, key=graph.place.__getitem__))


Roots = dict[str, Root]


def roots_of(graph: Graph) -> dict[str, Roots]:
    """For each value the projections (or norm gains) that it may be a linear image of.

    What else it is made of does not matter here: whether the projections turn is proved afterwards.
    """
    found: dict[str, Roots] = {}
    for name, node in graph.nodes.items():
        root = as_root(graph, node)
        parts = [found[n] for n in node.inputs] if node.op in THROUGH else []
        found[name] = {k: v for part in parts for k, v in part.items()} if root is None else {name: root}
    return found


def as_root(graph: Graph, node: Node) -> Root | None:
    view = weight_view(graph, node)
    if view is not None:
        return Root(node, graph.nodes[view.parameter].shape[view.output], is_gain=False)
    inner, gain = peel(graph, node.name, "aten.mul")
    if gain is not None and graph.nodes[skip_shape(graph, inner)].op.startswith("core."):
        return Root(node, node.shape[-1], is_gain=True, gain=gain)
    return None


@dataclass(frozen=True)
class Partner:
    """A further projection that turns as the queries or the keys do, and the operand of a product that it reaches."""

    root: Root
    operand: str
    as_keys: bool


def partners(
    graph: Graph, product: Node, roots: dict[str, Roots], queries: tuple[Root, ...], keys: tuple[Root, ...]
) -> list[Partner]:
    """Projections that meet these queries (or keys) in a product of their own: projected positions, say.

    q·k and q·r both stay if k and r turn by one matrix and q by its inverse transpose. A weight that is used several
    times, once for each step of a scan, is one partner: all its uses turn alike.
    """
    if len(queries) != 1 or len(keys) != 1 or queries[0].is_gain or keys[0].is_gain:
        return []
    sides = {queries[0].node.name: False, keys[0].node.name: True}
    weights = {written_by(graph, queries[0]), written_by(graph, keys[0])}
    found: list[Partner] = []
    for node in graph.nodes.values():
        operands = [a.name for a in node.args[:2] if isinstance(a, Ref)]
        if node.op != "aten.matmul" or node is product or any(len(roots[name]) != 1 for name in operands):
            continue
        pair = [next(iter(roots[name].values())) for name in operands]
        for root, operand, other in zip(pair, operands, pair[::-1], strict=True):
            if other.node.name in sides and written_by(graph, root) not in weights and root.width == other.width:
                sides[root.node.name] = not sides[other.node.name]
                weights.add(written_by(graph, root))
                found.append(Partner(root, operand, sides[root.node.name]))
    return found


def written_by(graph: Graph, root: Root) -> str:
    """The weight of a projection; the node itself where there is none."""
    view = weight_view(graph, root.node)
    return root.node.name if view is None else view.parameter


def contraction(
    prover: Prover,
    node: Node,
    queries: tuple[Root, ...],
    keys: tuple[Root, ...],
    known: KnownGroups,
    further: list[Partner],
) -> Iterator[Claim]:
    """Turn both sides at once, all projections of each; everything they touch must be a product of the two."""
    width, size = sum(root.width for root in queries), 0
    writers: dict[str, Tensor] = {}
    sites: list[Site] = []
    try:
        for root, ref in [*((r, node.args[0]) for r in queries), *((r, node.args[1]) for r in keys)]:
            add_root(prover.graph, root, reaching(prover, root, ref.name, size), writers, sites)
            size += root.width
        for partner in further:
            offset = width if partner.as_keys else 0
            coordinate = reaching(prover, partner.root, partner.operand, offset)
            add_root(prover.graph, partner.root, coordinate, writers, sites)
    except Blocked:
        return
    first_key = sites[len(queries)]
    turned = TurnWalk(prover.identity, writers, sites, size, WalkOptions(contracts=True)).run()
    gains = queries[0].is_gain
    only = turned.proved and bool(turned.contractions) and not turned.rotations and not (gains and turned.norms)
    if only and not bool(turned.blocks.any()):  # whatever else reads the space splits it into blocks
        yield from conclude(Root(node, width, gains), turned, first_key, known)


def reaching(prover: Prover, root: Root, operand: str, offset: int) -> Tensor:
    """The coordinates of a root that reach this operand of the product."""
    numbers = numbered(root.width, offset)
    within = between(prover.graph, root.node.name, operand)
    start = {root.node.name: placed(root.node, numbers)}
    walk = TurnWalk(prover.identity, start, [], offset + root.width, WalkOptions(contracts=True), within=within)
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


def conclude(query: Root, turned: Turned, own: Site, known: KnownGroups) -> Iterator[Claim]:
    """The claim about the key projection `own`; `query` says how wide all queries are, and whether they are gains."""
    products = one_way([p for c in turned.contractions for p in head_products(c.left, c.right)], query.width)
    parts = [] if query.is_gain else head_parts(products, known)
    parts = keeping_lengths(parts, [gram for form in turned.norms for gram in grams(form)])
    dof = len(gain_pairs(tuple(products))) if query.is_gain else sum(p.dimension for p in parts)
    if not dof:
        return
    every = tuple(turned.sites)
    yield ContractionClaim(
        law=TITLE,
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
        if bool((p.left > width).all()):
            p = p.flipped()
        if bool((p.left > width).any()) or bool((p.right <= width).any()):
            return []
        found.setdefault((tuple(p.left.tolist()), tuple(p.right.tolist())), []).append(p)
    return [merged(same) for same in found.values()]


KnownGroups = list[tuple[Products, list[Part]]]  # groups that were computed before: layers are often alike


def head_parts(products: list[Products], known: KnownGroups) -> list[HeadPart]:
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
    return with_shared_keys(found)


def with_shared_keys(parts: list[HeadPart]) -> list[HeadPart]:
    """Parts of several heads that meet the same keys are one part of all their queries.

    So it is with the rotary keys of latent attention, which all heads share beside keys of their own.

    Empty where parts share some keys or queries and are not alike: their groups are not known together.
    """
    found: dict[tuple[int, ...], HeadPart] = {}
    for part in parts:
        place = tuple(part.right.tolist())
        before = found.get(place)
        if before is not None and before.part is not part.part:
            return []
        queries = part.queries if before is None else torch.cat([before.queries, part.queries])
        found[place] = part if before is None else replace(before, queries=queries)
    if not found:
        return []
    numbers = torch.cat([torch.cat([part.right, *part.left]) for part in found.values()])
    return list(found.values()) if len(numbers.unique()) == len(numbers) else []


def by_keys(products: list[Products]) -> list[list[Products]]:
    groups: dict[tuple[int, ...], list[Products]] = {}
    for p in products:
        groups.setdefault(tuple(p.right.tolist()), []).append(p)
    return list(groups.values())


@dataclass(frozen=True)
class Meeting:
    """One key head: its coordinates, those of every query head it meets, and the map between them."""

    keys: list[int]
    queries: list[list[int]]
    map: Tensor  # queries × keys


@dataclass(frozen=True, kw_only=True)
class KeyBasis(BasisRewrite):
    """W_K ← B⁻¹W_K and W_Q ← (M·B·M⁻¹)ᵀW_Q, where B is a block of W_K and q·M·k is what counts."""

    claim: ContractionClaim

    def meetings(self) -> list[Meeting]:
        return [m for parts in by_head(self.claim.parts) for m in free_part(parts)]

    def heads(self) -> list[list[int]]:
        return [m.keys for m in self.meetings()]

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        own, meetings = self.own_site(), self.meetings()
        self.leave_identities(known)
        if len({len(m.keys) for m in meetings}) != 1:
            raise NotDone("heads of different sizes share one matrix")
        weight = tensors[self.target].movedim(own.axis, 0)
        rows = [places_of(own, m.keys) for m in meetings]
        columns = self.columns(weight, rows, known.lost_columns(self.target))
        blocks = [weight[r][:, columns].clone() for r in rows]
        actions = []
        for site in self.sites:
            here = set(site.coordinate.tolist())
            mine = [
                (places_of(site, coordinates), matrix)
                for meeting, block in zip(meetings, blocks, strict=True)
                for coordinates, matrix in turns(meeting, block)
                if here.issuperset(coordinates)
            ]
            actions.append((site, mine))
        self.turn(tensors, actions)
        return self.finish(tensors, rows, columns)


def turns(meeting: Meeting, block: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """What is done to the keys of a head, and to the queries of every head that meets them."""
    yield meeting.keys, torch.linalg.inv(block)
    turn = (meeting.map @ block @ torch.linalg.inv(meeting.map)).T
    for queries in meeting.queries:
        yield queries, turn


def free_part(parts: list[HeadPart]) -> Iterator[Meeting]:
    """The coordinates of a key head that may be mixed at will: all without rotary positions, else the unrotated."""
    single = [p for p in parts if p.keys.shape[1] == 1]
    if single:
        widest = max(single, key=lambda p: p.part.count)
        scales = 1 / widest.part.right_basis[:, 0, 0]  # W = M₀₁/M₀
        yield Meeting(widest.right.tolist(), [q.tolist() for q in widest.left], torch.diag(scales))


def by_head(parts: Iterable[HeadPart]) -> list[list[HeadPart]]:
    """The parts of every key head: parts of one head share the query heads, and follow each other."""
    heads: list[list[HeadPart]] = []
    for part in parts:
        if heads and heads[-1][0].head == part.head:
            heads[-1].append(part)
        else:
            heads.append([part])
    return heads


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, ContractionClaim)
    if claim.diagonal:
        raise NotDone("of two gains only the product counts; folding one into the other saves its numbers only")
    if any(part.allowed is not None for part in claim.parts):
        raise NotDone("behind a norm only rotations are free: nothing is stored less")
    if sum(s.role == "out" and len(graph.nodes[s.parameter].shape) > 1 for s in claim.sites) > 2:
        raise NotDone("queries or keys of several projections: no identity block is laid into one of them")
    return worthwhile(KeyBasis(graph=graph, claim=claim))


LAW = Law(
    title=TITLE,
    fix="nothing in code: `deadweight reduce` stores an identity block per head",
    searches=(Search(180, find),),
    rewriting=Rewriting(
        order=120, make=make_rewrite, slim_only="in the stock layout the identity block would still be stored"
    ),
)
