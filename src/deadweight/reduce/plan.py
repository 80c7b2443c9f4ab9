"""From claims to an ordered list of rewrites: what is done where, what it saves, and why the rest is not done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from deadweight.graph.node import Graph
from deadweight.laws.claim import Claim
from deadweight.laws.dw009_query_key_basis import ContractionClaim
from deadweight.laws.scale_claim import ScaleClaim
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import element_wise, is_vector
from deadweight.laws.turn_claim import TurnClaim
from deadweight.reduce.bases import KeyBasis, ValueBasis, WholeProjection
from deadweight.reduce.rewrite import NotDone, Rewrite
from deadweight.reduce.scales import FoldGain, FoldScale
from deadweight.reduce.shifts import Centre, Drop, Fold, FoldBack, LoseDirection, direct_absorber, folds_into_weights
from deadweight.source.model import Source

Layout = Literal["stock", "slim"]
Shrinks = Callable[[str, bool], str | None]
ORDER = ("DW007", "DW006", "DW008", "DW002", "DW003", "DW004", "DW011", "DW017", "DW005", "DW015", "DW010", "DW009")
SLIM_ONLY = {
    "DW005": "in the stock layout the emptied channel would still be stored",
    "DW008": "in the stock layout the emptied column would still be stored",
    "DW009": "in the stock layout the identity block would still be stored",
    "DW010": "in the stock layout the identity block would still be stored",
    "DW015": "in the stock layout the identity would still be stored",
}
NEVER = {
    "DW001": "unused only for the inputs that were traced; other inputs may read it",
    "DW012": "turning the whole stream saves no whole row or column; it changes every matrix for nothing",
    "DW013": "a vector would move from one table to the other, and both stay as large",
    "DW014": "one number; and it holds only if the norm's ε were 0",
    "DW016": "keeps probabilities, not logits",
    "DW018": "an average over experts, heads or buckets: no whole row or column goes",
    "DW019": "a product of two matrices; multiplying them out is a change of architecture",
}


@dataclass(frozen=True)
class Skipped:
    """A finding that is not carried out, and why."""

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
    layout: Layout,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    shrinks: Shrinks = lambda name, whole: None,
) -> Plan:
    """Every claim as rewrites at all the places it speaks for, in the order in which they must be done.

    `shrinks` says whether the module that holds a parameter can store less of it (None), or why it cannot.
    """
    plan, wanted, unwanted = Plan(), set(select), set(ignore)
    for claim in sorted(claims, key=lambda c: (rank(c), -len(graph.nodes[c.node].shape))):
        name = graph.parameters[claim.node]
        own = {claim.code, claim.name}
        if (wanted and not own & wanted) or own & unwanted:
            continue
        try:
            rewrite = made(graph, claim, layout)
            places = list(instances(source, [graph.stored_name(n) for n in rewrite.nodes], name))
        except NotDone as reason:
            for place in every_place(source, name):
                plan.skip(claim, place, str(reason))
            continue
        for names in places:
            placed = replace(rewrite, names=names)
            why = shrinks(placed.target, placed.whole) if layout == "slim" else None
            if why is None:
                plan.rewrites.append(placed)
            else:
                plan.skip(claim, placed.target, why)
    plan.rewrites = without_conflicts(plan, in_order(source, plan.rewrites))
    return plan


def rank(claim: Claim) -> int:
    return ORDER.index(claim.code) if claim.code in ORDER else len(ORDER)


def made(graph: Graph, claim: Claim, layout: Layout) -> Rewrite:
    """The rewrite of a claim, or the reason why there is none."""
    if claim.code in NEVER:
        raise NotDone(NEVER[claim.code])
    if layout == "stock" and claim.code in SLIM_ONLY:
        raise NotDone(SLIM_ONLY[claim.code])
    if graph.training:
        raise NotDone("the proof is for training; a checkpoint is reduced for eval")
    common = {"graph": graph, "claim": claim, "names": {}}
    if isinstance(claim, ShiftClaim):
        return of_shift(graph, claim, common)
    if isinstance(claim, ScaleClaim):
        return FoldScale(**common)  # type: ignore[arg-type]
    if claim.code == "DW006" and isinstance(claim, TurnClaim):
        return FoldGain(**common)  # type: ignore[arg-type]
    if claim.code == "DW010" and isinstance(claim, TurnClaim):
        return worthwhile(ValueBasis(**common))  # type: ignore[arg-type]
    if claim.code == "DW009" and isinstance(claim, ContractionClaim):
        if claim.diagonal:
            raise NotDone("of two gains only the product counts; folding one into the other saves its numbers only")
        if any(part.allowed is not None for part in claim.parts):
            raise NotDone("behind a norm only rotations are free: nothing is stored less")
        return worthwhile(KeyBasis(**common))  # type: ignore[arg-type]
    if claim.code == "DW015" and isinstance(claim, TurnClaim):
        return WholeProjection(**common)  # type: ignore[arg-type]
    if claim.code == "DW011":
        raise NotDone("a choice of scale for each hidden unit: nothing is stored less")
    raise NotDone("no rewrite is known for it")


def of_shift(graph: Graph, claim: ShiftClaim, common: dict) -> Rewrite:
    if claim.lost is not None:
        if folds_into_weights(claim):
            raise NotDone("no bias to fold the constant into")
        if len(graph.users[claim.node]) > 1:
            raise NotDone("its weight is used at several places, and would have to lose the direction at all of them")
        return LoseDirection(**common)
    if claim.verdict == "dead":
        if element_wise(claim) and is_vector(graph.nodes[claim.node]):
            return Drop(**common)
        if claim.code == "DW005":
            rewrite = Centre(**common)
            _ = rewrite.axis
            return rewrite
        raise NotDone("only an average of it is dead: no whole element goes")
    if folds_into_weights(claim):
        raise NotDone("no bias to fold into: a table or weight would have to take it over")
    if not element_wise(claim):
        raise NotDone("only an average of it folds: no whole element goes")
    if claim.code == "DW007" and (claim.partners or any(a.again for a in claim.absorbers)):
        raise NotDone("a layer that is used several times: which of its biases to give up is not worked out")
    if claim.code == "DW007" and (direct := direct_absorber(graph, claim)) is not None:
        return FoldBack(**common, taken=direct)
    return Fold(**common)


def worthwhile(rewrite: KeyBasis | ValueBasis) -> KeyBasis | ValueBasis:
    """Blocks of at least 2 × 2: with rotary positions all coordinates of a key head are spoken for."""
    heads = rewrite.heads()
    if not heads or max(map(len, heads)) < 2:
        raise NotDone("rotary positions leave two numbers per plane: an identity block would cost more than it saves")
    return rewrite


def instances(source: Source, parameters: Sequence[str], home: str) -> Iterator[dict[str, str]]:
    """The names of the same parameters at every place that the proof speaks for."""
    found = [{name: name for name in parameters}]
    for blocks in source.blocks:
        touched = {i for name in parameters if (i := blocks.index_in(name)) is not None}
        if not touched:
            continue
        own = blocks.index_in(home)
        if len(touched) > 2:
            raise NotDone("it moves the whole stream, through all layers")
        last = len(blocks.representatives) - 1
        if own is not None:
            offsets = [i - own for i in blocks.represented(own)]
        elif touched == {0}:
            offsets = [0]
        elif touched == {blocks.kept - 1}:
            offsets = [last - (blocks.kept - 1)]
        else:
            raise NotDone("it reaches from outside into the middle of the layers")
        spread = []
        for names in found:
            for offset in offsets:
                moved = {
                    k: v if (i := blocks.index_in(v)) is None else blocks.moved(v, i + offset) for k, v in names.items()
                }
                if all((i := blocks.index_in(v)) is None or i <= last for v in moved.values()):
                    spread.append(moved)
        found = spread
    yield from found


def every_place(source: Source, name: str) -> list[str]:
    """The same parameter in every block that its own block stands for."""
    found = [name]
    for blocks in source.blocks:
        if (i := blocks.index_in(name)) is not None:
            found = [blocks.moved(n, k) for n in found for k in blocks.represented(i)]
    return found


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
    """Leave out what would write into a parameter that an earlier rewrite has emptied."""
    emptied: set[str] = set()  # by a fold: what is dead may be written to, and stays without effect
    kept = []
    for rewrite in rewrites:
        into = {rewrite.name(n) for n in getattr(rewrite.claim, "into", ()) if n in rewrite.graph.parameters}
        fills = isinstance(rewrite, Fold) and (into - {rewrite.target}) & emptied
        if fills:
            plan.skip(rewrite.claim, rewrite.target, f"{sorted(fills)[0]} is already gone, and would be needed again")
            continue
        if isinstance(rewrite, Fold) and rewrite.target in emptied:
            continue
        if isinstance(rewrite, Fold) and bool(rewrite.moving().all()):
            emptied.add(rewrite.target)
        kept.append(rewrite)
    return kept
