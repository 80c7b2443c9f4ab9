"""A law as data: what it is called, how it is searched for, what its claims may say, and how they are carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from deadweight.claims.claim import Claim, Title
from deadweight.graph.node import Graph
from deadweight.laws.page import Page, parse_page, stored_page
from deadweight.proof.verdict import Tier
from deadweight.rewrite.rewrite import NotDone, Rewrite
from deadweight.search.prover import Prover

LAST = 1_000_000  # in the order of rewriting: what is never rewritten comes after all else


@dataclass(frozen=True)
class Search:
    """One way to find a law. `order` says when it is tried: a later search leaves out what an earlier one has taken.

    Below 80: what is dead. From 80: what folds. From 160: gauges.
    """

    order: int
    find: Callable[[Prover], Iterator[Claim]]


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """How the claims of a law are carried out on the weights.

    `make` turns a claim into a rewrite, or raises NotDone with the reason why this claim is left alone. `order` says
    which law goes first within a layer: a fold comes before what would empty the parameter that it folds into.
    """

    order: int
    make: Callable[[Graph, Claim], Rewrite]
    slim_only: str = ""  # why the stock layout gains nothing by it; empty: both layouts do
    all_blocks: bool = False  # its claims move the whole stream: proved again with every block of the model in place


@dataclass(frozen=True)
class Kept:
    """A law whose claims are reported and never carried out, and why."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Law:
    """One law. Its tangents are the motions of its claims (`Claim.motions`).

    `page` is the law for people, in Markdown; by default the file `pages/CODE.md` beside this one.
    """

    title: Title
    searches: tuple[Search, ...]
    rewriting: Rewriting | Kept
    fix: str  # what to write in the model's code, in one short sentence
    tiers: tuple[Tier, ...] = ("real",)  # what its claims may say about exactness
    avoidable: bool = False  # a flag or one line of the model's code avoids these parameters: advice begins here
    refusals: Callable[[Prover], Iterator[tuple[str, str]]] | None = None  # parameters it does not hold for, and why
    markdown: str = ""

    @cached_property
    def page(self) -> Page:
        return parse_page(self.title.code, self.markdown) if self.markdown else stored_page(self.title.code)

    @property
    def order_of_rewriting(self) -> int:
        return self.rewriting.order if isinstance(self.rewriting, Rewriting) else LAST

    @property
    def needs_all_blocks(self) -> bool:
        return isinstance(self.rewriting, Rewriting) and self.rewriting.all_blocks

    def rewrite(self, graph: Graph, claim: Claim, *, stock: bool) -> Rewrite:
        """The rewrite of a claim; NotDone gives the reason why there is none."""
        if isinstance(self.rewriting, Kept):
            raise NotDone(self.rewriting.why)
        if stock and self.rewriting.slim_only:
            raise NotDone(self.rewriting.slim_only)
        if graph.training:
            raise NotDone("the proof is for training; a checkpoint is reduced for eval")
        return self.rewriting.make(graph, claim)
