"""DW007 post-norm shift: a norm that feeds readers and the residual alike can lose its shift to the biases behind.

A layer that is used several times in a row reads another vector first (an input projection, an embedding norm). What
its own norm adds is lost to its biases only if that vector moves alike, for then the layer's input moves alike at every
use: the bias that is added there moves as a partner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.laws.dw006_norm_affine import on_residual_path
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.absorb import Absorber
from deadweight.proof.opsets import SHAPE
from deadweight.proof.shift import Outcome
from deadweight.proof.weights import weight_view
from deadweight.rewrite.effect import effect
from deadweight.rewrite.known import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors
from deadweight.rewrite.shifts import Fold, rewrite_shift
from deadweight.save.facts import Constant, Fact
from deadweight.search.prover import Prover
from deadweight.search.shifts import added_once, claimed, each_norm_shift, make_claim, norm_behind

TITLE = Title("DW007", "post-norm-shift")
KEEPS = SHAPE | {"aten.add", "aten.sub", "aten.dropout"}


def find(prover: Prover) -> Iterator[ShiftClaim]:
    yield from each_norm_shift(prover, TITLE, residual_takes_it)
    for node in prover.parameters():
        if is_vector(node) and len(prover.graph.users[node.name]) > 1:
            yield from with_partner(prover, node)


def with_partner(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """The shift of a norm that is used several times, together with a bias that is read as it is."""
    groups = torch.arange(1, torch.Size(node.shape).numel() + 1).reshape(node.shape)
    if norm_behind(prover.graph, added_once(prover.graph, node)) is None or claimed(prover, node, groups):
        return
    for partner in partners(prover.graph, node):
        outcome = prover.walk_together([node.name, partner], groups.reshape(-1), "weights")
        if outcome.proved and residual_takes_it(prover, node, outcome):
            claim = make_claim(prover, TITLE, node, groups, outcome)
            yield replace(claim, partners=(partner,), into=(partner, *claim.into))
            return


def partners(graph: Graph, node: Node) -> Iterator[str]:
    """Vectors that are added once, to what the same weights read as what this one is added to."""
    weights = {weight for addition in graph.users[node.name] for weight in read_by(graph, addition)}
    for name in graph.parameters:
        other = graph.nodes[name]
        if name == node.name or len(other.shape) != 1 or other.shape != node.shape or len(graph.users[name]) != 1:
            continue
        addition = graph.users[name][0]
        if addition.op == "aten.add" and weights & set(read_by(graph, addition)):
            yield name


def read_by(graph: Graph, node: Node) -> Iterator[str]:
    """The weights of the linear maps that read a value."""
    for reader in graph.users[node.name]:
        view = weight_view(graph, reader) if reader.op == "linear" else None
        if view is not None:
            yield view.parameter


def residual_takes_it(prover: Prover, node: Node, outcome: Outcome) -> bool:
    return bool(outcome.absorbed) and on_residual_path(prover, outcome)


@dataclass(frozen=True, kw_only=True)
class FoldBack(Fold):
    """The other way round: a bias that only meets the norm's shift moves into that shift, and becomes zero."""

    taken: Absorber

    @property
    def target(self) -> str:
        return self.name(self.taken.parameter)

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        source = self.name(self.claim.node)
        shift = tensors[self.target].reshape(tensors[source].shape)
        parameter = lambda node: self.value(tensors, node)  # noqa: E731
        amounts = effect(self.graph, self.claim, self.claim.node, shift, parameter)
        self.absorb(tensors, amounts, known)
        tensors[source] = tensors[source] + shift
        left = float(tensors[self.target].abs().max())
        assert left <= 1e-12 * float(shift.abs().max() + 1), left
        tensors[self.target] = torch.zeros_like(tensors[self.target])
        return [Constant(self.target, 0.0, "folded")]


def direct_absorber(graph: Graph, claim: ShiftClaim) -> Absorber | None:
    """The one bias that meets the shift itself, on the residual path, in the same order of channels."""
    direct = [a for a in claim.absorbers if a.kind == "bias" and is_direct(graph, claim.node, a)]
    if len(direct) != 1 or not bool((claim.groups != 0).all()):
        return None
    width = torch.Size(graph.nodes[claim.node].shape).numel()
    index = direct[0].index.reshape(-1, width) if direct[0].index.numel() % width == 0 else None
    in_order = index is not None and torch.equal(index, torch.arange(width).expand_as(index))
    return direct[0] if in_order and graph.nodes[direct[0].parameter].shape == (width,) else None


def is_direct(graph: Graph, source: str, absorber: Absorber) -> bool:
    """Whether nothing but sums and moves stands between."""
    reached, stack = set[str](), [source]
    while stack:
        for node in graph.users[stack.pop()]:
            if node.name not in reached:
                reached.add(node.name)
                stack.append(node.name)
    back, stack = set[str](), [absorber.node]
    while stack:
        name = stack.pop()
        if name in reached and name not in back:
            back.add(name)
            stack.extend(graph.nodes[name].inputs)
    return absorber.node in back and all(graph.nodes[n].op in KEEPS for n in back)


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, ShiftClaim)
    fold = rewrite_shift(graph, claim)
    if claim.partners or any(a.again for a in claim.absorbers):
        raise NotDone("a layer that is used several times: which of its biases to give up is not worked out")
    direct = direct_absorber(graph, claim)
    return fold if direct is None else FoldBack(graph=graph, claim=claim, taken=direct)


LAW = Law(title=TITLE, searches=(Search(140, find),), rewriting=Rewriting(order=10, make=make_rewrite))
