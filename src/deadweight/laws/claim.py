"""A claim: a law, the motion of parameters it speaks of, and its proof. The audit turns claims into findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from deadweight.audit.finding import Tier, Verdict
from deadweight.graph.node import Graph
from deadweight.proof.steps import Step

Motion = dict[str, Tensor]  # parameter node name to the direction in which it moves


@dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """`node` is the parameter that becomes redundant; `index` along `axis` names the part that is meant (None: all)."""

    code: str
    name: str
    node: str
    dof: int
    verdict: Verdict
    tier: Tier = "real"
    into: tuple[str, ...] = ()
    index: Tensor | None = None
    axis: int = 0
    steps: tuple[Step, ...] = ()
    note: str = ""
    epsilon: float = field(default=0.0)  # the ε that an "epsilon" claim takes for 0

    @abstractmethod
    def motions(self, graph: Graph, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Iterator[Motion]:
        """A spanning set of the directions that the claim calls redundant, at these parameter values (float64)."""
