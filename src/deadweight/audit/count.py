"""The count that the account gives: over several clones, for a single draw or a small vocabulary can only add to it.

A first layer that sees single tokens sees as many points as there are words, and with few words dimensions look
redundant that are not. A ReLU unit that is never or always on for the inputs drawn adds to the count as well. Both add;
nothing takes away. So a shortfall is taken for one only if it stays with more words and other parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from deadweight.audit.account import Account, account
from deadweight.audit.jacobian import Draw
from deadweight.claims.point import Values
from deadweight.graph.node import Graph
from deadweight.proof.opsets import POSITIVELY_HOMOGENEOUS
from deadweight.search.prover import Prover

MORE_WORDS = (41, 97)  # the narrow vocabulary has 11; a hidden layer of 12 units needs about 30 points
PATIENCE = 90.0  # seconds of processor time, after which no further clone is counted
TRIES = 6  # draws of parameters for ReLU models


class Counted(Protocol):
    """A clone: its graph, what was proved of it, and where it is evaluated."""

    @property
    def graph(self) -> Graph: ...
    @property
    def prover(self) -> Prover: ...
    @property
    def values(self) -> Values: ...
    @property
    def draw(self) -> Draw: ...
    @property
    def words(self) -> str: ...


def best_account(clone: Counted, again: Callable[..., Counted | None], *, widen: bool) -> Account:
    """The account with the smallest shortfall.

    `again` makes another clone, by `seed` and, if `widen`, by `vocabulary`; None where it cannot.
    """
    start, best, words = time.process_time(), count(clone), clone.words
    choice: dict[str, int] = {}
    for attempt in attempts(clone, widen=widen):
        if complete(best) or time.process_time() - start > PATIENCE:
            break
        if "vocabulary" in attempt and "vocabulary" not in choice and attempt["vocabulary"] != MORE_WORDS[0]:
            continue  # more words did not help: neither will many more
        other = again(**(choice | attempt))
        if other is None:
            continue
        found = count(other)
        if rank(found) < rank(best):
            best, words = found, other.words
            choice |= {k: v for k, v in attempt.items() if k == "vocabulary"}
    return replace(best, completeness=replace(best.completeness, clone=words))


def count(clone: Counted) -> Account:
    return account(clone.graph, clone.values, clone.draw, clone.prover.claims)


def complete(found: Account) -> bool:
    return surplus(found) == 0 and not found.unsound and found.decided


def rank(found: Account) -> tuple[bool, int]:
    """What is decided comes before what is not; then the smaller shortfall."""
    return not found.decided, surplus(found)


def surplus(found: Account) -> int:
    """Redundant dimensions that nothing explains."""
    return found.completeness.measured - found.completeness.explained


def attempts(clone: Counted, *, widen: bool) -> Iterator[dict[str, int]]:
    if widen:
        yield from ({"vocabulary": words} for words in MORE_WORDS)
    if any(n.op in POSITIVELY_HOMOGENEOUS for n in clone.graph.nodes.values()):
        yield from ({"seed": seed} for seed in range(1, TRIES))
