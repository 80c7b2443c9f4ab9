"""A rewrite: one claim, applied to the weights of one place in the model, in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.errors import DeadweightError
from deadweight.graph.node import Graph
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.save.facts import Fact


class Tensors(MutableMapping[str, Tensor]):
    """The model's weights by state-dict name, in float64 when read."""

    @abstractmethod
    def scale(self, name: str, axis: int, factor: Tensor) -> None:
        """Multiply a weight by one factor per index of an axis; the rewrite must not read it afterwards."""


class NotDone(DeadweightError):
    """A rewrite that the proof allows, but that is left out; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Rewrite(ABC):
    """`names` maps the graph's parameter names to those of the block that is rewritten; empty in a template."""

    graph: Graph
    claim: Claim
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The parameter that, in part or whole, is no longer needed."""
        return self.name(self.claim.node)

    def name(self, node: str) -> str:
        return self.names[self.graph.stored_name(node)]

    @property
    @abstractmethod
    def nodes(self) -> tuple[str, ...]:
        """Every parameter node that is read or written."""

    @property
    @abstractmethod
    def saves(self) -> int:
        """How many numbers need not be stored after the rewrite."""

    @property
    def whole(self) -> bool:
        """Whether the whole target becomes a constant."""
        return False

    @property
    def makes_identity(self) -> bool:
        """Whether the whole target becomes the identity matrix: no other rewrite may change its basis."""
        return False

    @property
    def stored_together(self) -> bool:
        """Whether the modules that it touches must be stored together, when all their weights are final."""
        return False

    def with_tighter_limits(self) -> Iterator[Rewrite]:
        """The same rewrite with tighter limits on the growth of rounding errors, the loosest first."""
        yield from ()

    @abstractmethod
    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        """Change the weights, and return the facts that hold now; `known` are those of earlier rewrites.

        Raises NotDone before anything is changed.
        """

    @cached_property
    def touches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.name(n) for n in self.nodes))

    def value(self, tensors: Mapping[str, Tensor], node: str) -> Tensor:
        return tensors[self.name(node)]


def chosen_place(weight: Tensor, axis: int, allowed: Tensor | None = None) -> int:
    """The slice with the smallest norm: it is subtracted from all others, and should be small."""
    norms = weight.movedim(axis, 0).flatten(1).norm(dim=1) if weight.ndim > 1 else weight.abs()
    if allowed is not None:
        norms = torch.where(allowed, norms, torch.inf)
    return int(norms.argmin())


def as_index(places: Iterable[int] | Tensor) -> tuple[int, ...]:
    return tuple(int(p) for p in places)
