"""DW007 post-norm shift: a norm that feeds readers and the residual alike can lose its shift to the biases behind.

A layer that is used several times in a row reads another vector first (an input projection, an embedding norm). What
its own norm adds is lost to its biases only if that vector moves alike, for then the layer's input moves alike at every
use: the bias that is added there moves as a partner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.laws.dw006_norm_affine import on_residual_path
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.shift import Outcome
from deadweight.proof.weights import weight_view
from deadweight.rewrite.rewrite import NotDone, Rewrite
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.prover import Prover
from deadweight.search.shifts import added_once, claimed, each_norm_shift, norm_behind, vector_claim

TITLE = Title("DW007", "post-norm-shift")


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
            claim = vector_claim(prover, TITLE, node, groups, outcome)
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


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, ShiftClaim)
    fold = rewrite_shift(graph, claim)
    if claim.partners or any(a.again for a in claim.absorbers):
        raise NotDone("a layer that is used several times: which of its biases to give up is not worked out")
    return fold


LAW = Law(
    title=TITLE,
    fix="build the second feed-forward layer with bias=False; the norm's shift remains",
    searches=(Search(140, find),),
    rewriting=Rewriting(order=10, make=make_rewrite),
)
