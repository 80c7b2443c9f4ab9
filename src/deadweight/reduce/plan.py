"""From claims to an ordered list of rewrites: what is done where, and why the rest is not done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from deadweight.claims.claim import Claim, Title
from deadweight.graph.node import Graph
from deadweight.laws.catalogue import Catalogue, every_law
from deadweight.rewrite.rewrite import NotDone, Rewrite
from deadweight.rewrite.scales import FoldScale
from deadweight.rewrite.shifts import Fold
from deadweight.source.model import Source

Layout = Literal["stock", "slim"]
Shrinks = Callable[[str, bool], str | None]  # of a parameter, whole or in part: why it cannot be stored in less


@dataclass(frozen=True)
class Request:
    """What to do: in which layout, by which laws (codes or names; none means all), and without which."""

    layout: Layout
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    laws: Catalogue = field(default_factory=every_law)

    def wants(self, law: Title) -> bool:
        return (not self.select or bool(self.select & set(law))) and not self.ignore & set(law)


@dataclass(frozen=True)
class Skipped:
    """A finding that is not applied, and why."""

    code: str
    law: str
    parameter: str
    why: str
    dof: int = 0


@dataclass
class Plan:
    """What will be done, in order, and what will not."""

    rewrites: list[Rewrite] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def saves(self) -> int:
        return sum(r.saves for r in self.rewrites)

    def skip(self, claim: Claim, name: str, why: str) -> None:
        self.skipped.append(Skipped(claim.code, claim.name, name, why, claim.dof))


def make_plan(
    source: Source,
    graph: Graph,
    claims: Sequence[Claim],
    request: Request,
    shrinks: Shrinks = lambda name, whole: None,
) -> Plan:
    """Every claim as rewrites in all blocks that it holds for, in the order in which they must be applied.

    `shrinks` returns None if the module that holds a parameter can store less of it, or the reason why not.
    """
    plan, stock = Plan(), request.layout == "stock"
    wanted = [(request.laws.law_of(c), c) for c in claims if request.wants(c.law)]
    for law, claim in sorted(wanted, key=lambda p: (p[0].order_of_rewriting, -len(graph.nodes[p[1].node].shape))):
        name = graph.parameters[claim.node]
        try:
            rewrite = law.rewrite(graph, claim, stock=stock)
            places = list(instances(source, [graph.stored_name(n) for n in rewrite.nodes], name))
        except NotDone as reason:
            for place in every_place(source, name):
                plan.skip(claim, place, str(reason))
            continue
        for names in places:
            placed = replace(rewrite, names=names)
            why = shrinks(placed.target, placed.whole) if not stock else None
            if why is None:
                plan.rewrites.append(placed)
            else:
                plan.skip(claim, placed.target, why)
    plan.rewrites = without_conflicts(plan, in_order(source, plan.rewrites))
    return plan


def instances(source: Source, parameters: Sequence[str], home: str) -> Iterator[dict[str, str]]:
    """The names of the same parameters in every block that the proof holds for."""
    places = [{name: name for name in parameters}]
    for blocks in source.blocks:
        touched = {i for name in parameters if (i := blocks.index_in(name)) is not None}
        if not touched:
            continue
        own = blocks.index_in(home)
        if len(touched) > 2:
            raise NotDone("it changes the basis of the whole residual stream, through all layers")
        last = len(blocks.representatives) - 1
        if own is not None:
            offsets = [i - own for i in blocks.represented(own)]
        elif touched == {0}:
            offsets = [0]
        elif touched == {blocks.kept - 1}:
            offsets = [last - (blocks.kept - 1)]
        else:
            raise NotDone("it connects a parameter outside the layers with one in the middle of them")
        spread = []
        for names in places:
            for offset in offsets:
                moved = {
                    k: v if (i := blocks.index_in(v)) is None else blocks.moved(v, i + offset) for k, v in names.items()
                }
                if all((i := blocks.index_in(v)) is None or i <= last for v in moved.values()):
                    spread.append(moved)
        places = spread
    yield from places


def every_place(source: Source, name: str) -> list[str]:
    """The same parameter in every block that its block represents."""
    result = [name]
    for blocks in source.blocks:
        if (i := blocks.index_in(name)) is not None:
            result = [blocks.moved(n, k) for n in result for k in blocks.represented(i)]
    return result


def layer_of(source: Source, name: str) -> int:
    """The block a parameter belongs to; −1 outside."""
    for blocks in source.blocks:
        if (i := blocks.index_in(name)) is not None:
            return i
    return -1


def in_order(source: Source, rewrites: list[Rewrite]) -> list[Rewrite]:
    """Layer by layer, so that few weights are open at a time; within a layer by law."""
    order = {id(r): n for n, r in enumerate(rewrites)}
    return sorted(rewrites, key=lambda r: (max(layer_of(source, n) for n in r.touches), order[id(r)]))


def without_conflicts(plan: Plan, rewrites: list[Rewrite]) -> list[Rewrite]:
    """Leave out rewrites that would set a parameter to zero into which another one writes."""
    scales = [r for r in rewrites if isinstance(r, FoldScale)]
    needed = {r.name(r.claim.shift) for r in scales if r.claim.shift is not None}
    emptied: set[str] = set()  # by a fold; a dead parameter may be written to, since it has no effect
    kept = []
    for rewrite in rewrites:
        into = {rewrite.name(n) for n in getattr(rewrite.claim, "into", ()) if n in rewrite.graph.parameters}
        if isinstance(rewrite, Fold) and rewrite.target in needed:
            plan.skip(rewrite.claim, rewrite.target, "the statistics of its BatchNorm are folded into it")
            continue
        fills = isinstance(rewrite, Fold) and (into - {rewrite.target}) & emptied
        if fills:
            plan.skip(
                rewrite.claim,
                rewrite.target,
                f"an earlier rewrite has removed {sorted(fills)[0]}, into which it would fold",
            )
            continue
        if isinstance(rewrite, Fold) and rewrite.target in emptied:
            continue
        if isinstance(rewrite, Fold) and bool(rewrite.moving().all()):
            emptied.add(rewrite.target)
        kept.append(rewrite)
    return kept
