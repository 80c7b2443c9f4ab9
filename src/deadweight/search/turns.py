"""The search for spaces, shared by the basis laws: each space is explored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.claims.claim import Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph, Node
from deadweight.proof.basis import DifferentGains, Site, Turned, expert_of
from deadweight.proof.operation_groups import CONVOLUTIONS
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import uses_of, weight_view
from deadweight.search.prover import Prover
from deadweight.search.spaces import Writers, add_table, explore, numbered_outputs, output_parts, placed, same


@dataclass(frozen=True)
class Space:
    """A space with its writers, and what is left of its group."""

    seed: Node
    writers: Writers
    turned: Turned
    writing: frozenset[str]  # the matrices and tables that write it; one that is used in several places is still one

    def passed(self, *ops: str) -> bool:
        return any(s.op in ops for s in self.turned.steps)

    @property
    def of_experts(self) -> bool:
        """Whether every expert has a space of its own."""
        return any(s.expert is not None for s in self.turned.sites)


def spaces(prover: Prover) -> list[Space]:
    """Every space that some linear map, table or convolution writes."""
    return prover.remember(explore_spaces)


def explore_spaces(prover: Prover) -> list[Space]:
    return list(each_space(prover))


def each_space(prover: Prover) -> Iterator[Space]:
    """A space before a gain is tried last: it scales with the sum that reads it, unless that space has no proof."""
    covered: set[str] = set()
    turned: set[str] = set()  # what a space with a proof moves
    before_gains: list[Space] = []
    nodes = sorted(
        prover.graph.nodes.values(), key=lambda n: n.op == "aten.embedding"
    )  # tables last: most are brought in
    for node in nodes:
        if node.name in covered or node.name not in prover.graph.live:
            continue
        for space in written_spaces(prover, node):
            if isinstance(space.turned.blocked, DifferentGains):
                before_gains.append(space)
                continue
            covered.update(space.writers.nodes)
            covered.update(where_written(prover.graph, space.turned))
            if space.turned.proved:
                turned.update(site.parameter for site in space.turned.sites)
            yield space
    for space in before_gains:
        if space.writing & turned:
            yield space
            continue
        again = explored(prover, space.seed, *same_seed(prover, space), gains=True)
        turned.update(site.parameter for site in again.turned.sites if again.turned.proved)
        yield again


def same_seed(prover: Prover, space: Space) -> tuple[Writers, int]:
    """The writers from which a space was explored, as they were before others were brought in."""
    every = (seed for whole in (False, True) for seed in seeds(prover.graph, space.seed, whole=whole))
    return next(seed for seed in every if same(seed[0].sites[0], space.writers.sites[0]))


def written_spaces(prover: Prover, node: Node) -> Iterator[Space]:
    """The spaces of the parts of a node's output that are read; if none is proved, that of the whole output.

    Parts of a fused weight have spaces of their own. Parts of a sum have not: the other writers write it whole.
    """
    found = [explored(prover, node, *seed) for seed in seeds(prover.graph, node)]
    yield from found
    in_parts = any(bool((space.writers.sites[0].coordinate == 0).any()) for space in found)
    if in_parts and not any(space.turned.proved for space in found):
        yield from (explored(prover, node, *seed) for seed in seeds(prover.graph, node, whole=True))


def explored(prover: Prover, node: Node, writers: Writers, size: int, *, gains: bool = False) -> Space:
    turned = explore(prover, writers, size, powers=True, gains=gains)
    return Space(node, writers, turned, frozenset(matrices(prover.graph, writers)))


def where_written(graph: Graph, turned: Turned) -> Iterator[str]:
    """The operations through which parameters write a space, look-ups of biases that turn along among them.

    Where biases turn expert by expert, all experts turned alike is part of that, and not one more.
    """
    for site in turned.sites:
        if site.role == "out":
            yield from (user.name for user in graph.users[site.parameter])


def matrices(graph: Graph, writers: Writers) -> Iterator[str]:
    """The parameters through which the writers write, biases aside."""
    for node in (graph.nodes[name] for name in writers.nodes):
        view = weight_view(graph, node, rows_only=True)
        if view is not None:
            yield view.parameter
        elif node.op != "parameter" or len(node.shape) > 1:
            yield node.inputs[0] if node.op == "aten.embedding" else node.name


def seeds(graph: Graph, node: Node, *, whole: bool = False) -> Iterator[tuple[Writers, int]]:
    """The spaces that a node writes, in parts or as a whole; a convolution in groups writes its channels one by one."""
    view = weight_view(graph, node, rows_only=True)
    if view is not None:
        width = graph.nodes[view.parameter].shape[view.output]
        uses = list(uses_of(graph, view.parameter))
        for part in [numbered_outputs(node, width)] if whole else output_parts(graph, node, width):
            if all(weight_view(graph, graph.nodes[u], rows_only=True) == view for u in uses):
                coordinate = along_channels(node, part)
                own = None if view.expert is None or len(uses) > 1 else expert_of(node)
                site = Site(view.parameter, "out", view.output, coordinate, expert=None if own is None else view.expert)
                writers = Writers(sites=[site], expert=own)
                writers.nodes.update({use: placed(graph.nodes[use], coordinate) for use in uses})
                yield writers, width
    elif node.op == "aten.embedding":
        writers = Writers()
        try:
            add_table(graph, writers, node, scalar=False)
        except Blocked:
            return
        yield writers, node.shape[-1]


def along_channels(node: Node, part: Tensor) -> Tensor:
    axis = 1 if node.op in CONVOLUTIONS else part.ndim - 1
    return part.movedim(axis, -1).reshape(-1, part.shape[axis])[0]


def dimension(turned: Turned) -> int:
    """The dimension of the group that is left."""
    sizes = turned.block_sizes()
    diagonal = any(s.role == "gain" for s in turned.sites)
    if turned.rotations:
        free = [] if diagonal else [n - int(turned.fixes_ones) for n in sizes]
        return sum(n * (n - 1) // 2 for n in free)
    return sum(sizes) if diagonal else sum(n * n for n in sizes)


def expert_count(prover: Prover, turned: Turned) -> int:
    """How many experts have a space of their own, each of which may be turned by itself; 1 for a common space."""
    counts = {1 if s.expert is None else prover.graph.nodes[s.parameter].shape[s.expert] for s in turned.sites}
    assert len(counts) == 1, "some sites belong to experts and some do not"
    return counts.pop()


def for_each_expert(site: Site, count: int, size: int) -> Site:
    """The same site with coordinates of their own for every expert, one after the other."""
    if site.expert is None:
        return site
    offsets = torch.arange(count).reshape(-1, 1) * size
    coordinate = torch.where(site.coordinate == 0, 0, site.coordinate + offsets).reshape(-1)
    copy = None if site.copy is None else site.copy.expand(count, -1).reshape(-1)
    return replace(site, coordinate=coordinate, copy=copy)


def turn_claim(prover: Prover, law: Title, node: str, turned: Turned, **options: object) -> TurnClaim:
    own = next(s for s in turned.sites if s.parameter == node)
    others = tuple(dict.fromkeys(s.parameter for s in turned.sites if s.parameter != node))
    count = expert_count(prover, turned)
    sites = tuple(for_each_expert(s, count, turned.size) for s in turned.sites)
    blocks = torch.arange(turned.size + 1) if any(s.role == "gain" for s in sites) else turned.blocks
    further = [blocks[1:] + (int(blocks.max()) + 1) * e for e in range(1, count)]
    blocks = torch.cat([blocks, *further])
    return TurnClaim(
        law=law,
        node=node,
        dof=dimension(turned) * count,
        verdict="gauge",
        into=others,
        index=moved_index(own),
        axis=own.axis,
        steps=tuple(turned.steps),
        sites=sites,
        blocks=blocks,
        rotations=turned.rotations,
        fixes_ones=turned.fixes_ones,
        **options,  # type: ignore[arg-type]
    )


def moved_index(site: Site) -> Tensor | None:
    """The part of the parameter that takes part, along the site's axis; None: all."""
    inside = site.coordinate != 0
    return None if bool(inside.all()) else torch.nonzero(inside).reshape(-1)
