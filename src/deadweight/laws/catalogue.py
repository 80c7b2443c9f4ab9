"""The catalogue of laws: every file dwNNN_*.py of this folder, and what can be asked of all of them together."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import deadweight.laws
from deadweight.claims.claim import Claim
from deadweight.graph.node import Graph
from deadweight.laws.law import Law, Search
from deadweight.laws.page import Page, law_codes
from deadweight.progress import Progress, silent
from deadweight.search.prover import Prover
from deadweight.search.stabiliser import without_stabilisers


@dataclass(frozen=True)
class Catalogue:
    """Laws, by code."""

    laws: tuple[Law, ...]

    def codes(self, given: str | Sequence[str] | None) -> tuple[str, ...] | None:
        """The codes of laws that are given by code or name; None where none is given. Raises for an unknown name."""
        return law_codes(given, [law.title for law in self.laws]) if given else None

    def law_of(self, claim: Claim) -> Law:
        return next(law for law in self.laws if law.title == claim.law)

    def with_law(self, law: Law) -> Catalogue:
        """A copy with one more law."""
        return Catalogue(tuple(sorted((*self.laws, law), key=lambda law: law.title)))

    @property
    def pages(self) -> tuple[Page, ...]:
        return tuple(law.page for law in self.laws)

    def in_search_order(self) -> list[tuple[Law, Search]]:
        """Every search with its law, in the order in which they are tried."""
        return sorted(((law, search) for law in self.laws for search in law.searches), key=lambda pair: pair[1].order)

    def search(self, graph: Graph, progress: Progress = silent) -> Prover:
        """Every claim that some law proves of this graph."""
        prover = Prover(graph)
        order = self.in_search_order()
        for number, (law, search) in enumerate(order):
            progress(" ".join(law.title), number, len(order))
            for claim in search.find(prover):
                assert claim.law == law.title and claim.tier in law.tiers, (law.title, claim.law, claim.tier)
                if claim.verdict == "gauge" or not any(c.whole and c.node == claim.node for c in prover.claims):
                    prover.claims.append(claim)
        prover.claims[:] = without_stabilisers(graph, prover.claims)
        return prover


@cache
def every_law() -> Catalogue:
    """The laws of this folder."""
    return Catalogue(tuple(sorted(read_laws(), key=lambda law: law.title)))


def read_laws() -> Iterator[Law]:
    for module in pkgutil.iter_modules(deadweight.laws.__path__):
        if module.name.startswith("dw"):
            yield importlib.import_module(f"deadweight.laws.{module.name}").LAW


def search(graph: Graph) -> Prover:
    """Every claim that some law of the catalogue proves of this graph."""
    return every_law().search(graph)
