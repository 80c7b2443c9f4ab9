"""The best account of several clones: a small vocabulary or an unlucky draw makes the count of one too large.

A first layer that reads single tokens sees as many points as there are tokens; with few of them, some dimensions look
redundant and are not. So do those of a ReLU unit that is off, or on, for almost all inputs drawn. Nothing makes the
count too small. So a shortfall is reported only if it remains with a larger vocabulary and with other parameters. For
ReLU models these have small biases, so that every unit is on for many inputs and off for many.
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
SMALL_BIASES = 0.2  # of the first draw's: 0.1 n in place of 0.5 n, beside pre-activations of about 1


@dataclass(frozen=True)
class CloneChoice:
    """Which clone to make: the seed of its parameters, a factor for its biases, and the size of its vocabulary."""

    seed: int = 0
    biases: float = 1.0
    vocabulary: int | None = None  # the narrow one

    def scale_biases(self, graph: Graph, values: Values) -> Values:
        """The same values, with the factor at every parameter that is called a bias."""
        names = {node for node, name in graph.parameters.items() if "bias" in name.rpartition(".")[2]}
        scaled = {n: values[n] * self.biases for n in names if values[n].is_floating_point()}
        return values | scaled if self.biases != 1 else values


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
    has_relu = any(n.op in POSITIVELY_HOMOGENEOUS for n in clone.graph.nodes.values())
    biases = SMALL_BIASES if has_relu else 1.0
    if has_relu:
        yield CloneChoice(biases=biases)
    if widen:
        yield from (CloneChoice(biases=biases, vocabulary=tokens) for tokens in MORE_TOKENS)
    if has_relu:
        yield from (CloneChoice(seed, biases) for seed in range(1, TRIES))
