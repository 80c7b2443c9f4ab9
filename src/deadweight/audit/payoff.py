"""What leaving out the redundant dimensions of a finding saves."""

from __future__ import annotations

from deadweight.audit.result import Payoff
from deadweight.claims.claim import Claim
from deadweight.graph.node import Graph, is_vector
from deadweight.laws.law import Kept, Law


def payoff_of(graph: Graph, claim: Claim, law: Law) -> Payoff:
    """One number for every dof; nothing for a gauge that is never carried out.

    A number of a matrix costs two FLOPs, of a vector one, of a look-up table none.
    """
    if claim.verdict == "gauge" and isinstance(law.rewriting, Kept):
        return Payoff()
    node = graph.nodes[claim.node]
    readers = {reader.op for reader in graph.users.get(claim.node, ())}
    cost = 0 if readers <= {"aten.embedding"} else 1 if is_vector(node) else 2
    size = node.dtype.itemsize if node.dtype is not None else 0
    return Payoff(claim.dof, claim.dof * size, claim.dof * cost)
