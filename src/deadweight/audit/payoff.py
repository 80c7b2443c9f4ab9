"""What leaving out the redundant dimensions of a finding saves."""

from __future__ import annotations

from deadweight.audit.result import Payoff
from deadweight.claims.claim import Claim
from deadweight.graph.node import Graph, Node, is_vector
from deadweight.laws.law import Kept, Law
from deadweight.rewrite.rewrite import NotDone
from deadweight.source.model import Source


def payoff_of(source: Source, graph: Graph, claim: Claim, law: Law) -> Payoff:
    """One number for every dof; nothing for a gauge that `reduce` does not carry out.

    A number of a matrix costs two FLOPs, of a vector one, of a look-up table none.
    """
    if claim.verdict == "gauge" and not is_carried_out(graph, claim, law):
        return Payoff()
    node = graph.nodes[claim.node]
    readers = {reader.op for reader in graph.users.get(claim.node, ())}
    cost = 0 if readers <= {"aten.embedding"} else 1 if is_vector(node) else 2
    return Payoff(claim.dof, claim.dof * stored_size(source, node), claim.dof * cost)


def is_carried_out(graph: Graph, claim: Claim, law: Law) -> bool:
    """Whether the law has a rewrite that stores less for this claim, in the slim layout."""
    if isinstance(law.rewriting, Kept):
        return False
    try:
        law.rewriting.make(graph, claim)
    except NotDone:
        return False
    return True


def stored_size(source: Source, node: Node) -> int:
    """Bytes of one number in the checkpoint; in the module, where there is no checkpoint."""
    if node.dtype is None:
        return 0
    stored = source.stored_dtype if node.dtype.is_floating_point else None
    return (stored or node.dtype).itemsize
