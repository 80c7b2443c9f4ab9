"""The best account of several clones: a small vocabulary or an unlucky draw makes the count of one too large.

A first layer that reads single tokens sees as many points as there are tokens; with few of them, some dimensions look
redundant and are not. So does a ReLU unit that is off, or on, for all inputs drawn. Nothing makes the count too small.
So a shortfall is reported only if it remains with a larger vocabulary and with other parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from deadweight.audit.account import Account, make_account
from deadweight.audit.jacobian import Draw
from deadweight.claims.point import Values
from deadweight.graph.node import Graph
from deadweight.proof.operation_groups import POSITIVELY_HOMOGENEOUS
from deadweight.search.prover import Prover

MORE_TOKENS = (41, 97)  # the narrow vocabulary has 11; a hidden layer of 12 units needs about 30 points
PATIENCE = 90.0  # seconds of CPU time, after which no further clone is counted
TRIES = 6  # draws of parameters for ReLU models


@dataclass(frozen=True)
class CloneChoice:
    """Which clone to make: the seed of its parameters, and the size of its vocabulary (None: the narrow one)."""

    seed: int = 0
    vocabulary: int | None = None


FIRST = CloneChoice()


class Counted(Protocol):
    """A clone: its graph, what was proved about it, and the point at which it is evaluated."""

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


def best_account(clone: Counted, another: Callable[[CloneChoice], Counted | None], *, widen: bool) -> Account:
    """The account with the smallest shortfall.

    `another` makes another clone, or None where it cannot. The vocabulary is only changed if `widen`.
    """
    start, best, words = time.process_time(), count(clone), clone.words
    vocabulary: int | None = None
    for choice in choices(clone, widen=widen):
        if complete(best) or time.process_time() - start > PATIENCE:
            break
        if choice.vocabulary not in (None, MORE_TOKENS[0]) and vocabulary is None:
            continue  # a larger vocabulary did not help: an even larger one will not either
        other = another(choice if choice.vocabulary is not None else replace(choice, vocabulary=vocabulary))
        if other is None:
            continue
        account = count(other)
        if rank(account) < rank(best):
            best, words = account, other.words
            vocabulary = choice.vocabulary or vocabulary
    return replace(best, completeness=replace(best.completeness, clone=words))


def count(clone: Counted) -> Account:
    return make_account(clone.graph, clone.values, clone.draw, clone.prover.claims)


def complete(account: Account) -> bool:
    return surplus(account) == 0 and not account.unsound and account.decided


def rank(account: Account) -> tuple[bool, int]:
    """The smaller the better: decided accounts come first, then those with a smaller shortfall."""
    return not account.decided, surplus(account)


def surplus(account: Account) -> int:
    """Redundant dimensions that no law explains."""
    return account.completeness.measured - account.completeness.explained


def choices(clone: Counted, *, widen: bool) -> Iterator[CloneChoice]:
    if widen:
        yield from (CloneChoice(vocabulary=tokens) for tokens in MORE_TOKENS)
    if any(n.op in POSITIVELY_HOMOGENEOUS for n in clone.graph.nodes.values()):
        yield from (CloneChoice(seed) for seed in range(1, TRIES))
