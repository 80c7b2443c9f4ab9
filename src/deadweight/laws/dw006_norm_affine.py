"""DW006 norm gain and shift: what a norm multiplies by and adds, its linear readers can do themselves.

The shift is a shift proof; the gain is a basis proof, a diagonal one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph, Node
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.basis import Site
from deadweight.proof.operation_groups import HOMOGENEOUS_OVER_PLACES, POSITIVELY_HOMOGENEOUS
from deadweight.proof.shift import Outcome
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.rewrite.shift_effect import StaticValues
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.save.facts import Constant, Fact
from deadweight.search.prover import Prover
from deadweight.search.read_gains import find_read_gains
from deadweight.search.shifts import each_norm_shift

TITLE = Title("DW006", "norm-affine")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    return each_norm_shift(prover, TITLE, readers_take_it)


def readers_take_it(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """Every absorber stands right behind a linear map that reads the norm."""
    return bool(outcome.absorbed) and not on_residual_path(prover, outcome)


def on_residual_path(prover: Prover, outcome: Outcome) -> bool:
    """Whether some absorber met the shift itself, not a linear image of it."""
    return any(a.kind != "lost" and not behind_linear(prover, a.node) for a, _ in outcome.absorbed.values())


def behind_linear(prover: Prover, name: str) -> bool:
    node = prover.graph.nodes[name]
    return any(prover.graph.nodes[n].op in ("linear", "aten.conv1d", "aten.conv2d") for n in node.inputs)


@dataclass(frozen=True, kw_only=True)
class FoldGain(Rewrite):
    """The readers' columns take the gain of a norm, which becomes one."""

    claim: TurnClaim

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.parameter for s in self.claim.sites))

    @property
    def saves(self) -> int:
        return self.claim.dof

    @property
    def whole(self) -> bool:
        return True

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        own = next(s for s in self.claim.sites if s.role == "gain")
        assert own.value is not None
        values = StaticValues(self.graph, lambda node: self.value(tensors, node))
        gain = values.of(own.value).reshape(-1)
        units = POSITIVELY_HOMOGENEOUS | HOMOGENEOUS_OVER_PLACES
        if not bool((gain > 0).all()) and any(step.op in units for step in self.claim.steps):
            raise NotDone("its gain is negative in some channel, and a ReLU or a maximum behind it passes no sign")
        factor = torch.ones(len(self.claim.blocks), dtype=torch.float64)
        factor[own.coordinate] = gain
        for site in self.claim.sites:
            kept = site.role == "out" and bool((self.value(tensors, site.parameter) != 0).any())
            if kept and float(gain.abs().min()) < 1e-3 * float(gain.abs().max()):
                raise NotDone("the norm keeps a shift, and its gain is too close to zero in some channel")
        for site in self.claim.sites:
            name = self.name(site.parameter)
            if site.role in ("in", "out"):
                tensors.scale(name, site.axis, per_index(site, factor if site.role == "in" else 1 / factor))
        rest = tensors[self.target] + (1 - gain).reshape(tensors[self.target].shape)
        settled = float(rest.reshape(-1)[0].round())
        if float((rest - settled).abs().max()) > 1e-12:
            raise NotDone("its parameter is not the gain itself, and does not become a constant")
        tensors[self.target] = torch.full_like(rest, settled)
        return [Constant(self.target, settled)]


def per_index(site: Site, factor: Tensor) -> Tensor:
    """Each index of the site's axis with its coordinate's factor."""
    factors = torch.where(site.coordinate == 0, 1.0, factor[site.coordinate])
    return torch.where(torch.isfinite(factors), factors, 1.0)


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    return FoldGain(graph=graph, claim=claim) if isinstance(claim, TurnClaim) else rewrite_shift(graph, claim)


LAW = Law(
    title=TITLE,
    fix="build the norm without gain and shift, or fold them in after training",
    searches=(Search(130, find), Search(160, partial(find_read_gains, law=TITLE, of_norms=True))),
    rewriting=Rewriting(order=20, make=make_rewrite),
)
